// What the engine's context and its prefix tree hold, and how one becomes the other.
#include "engine/engine.h"

#include <algorithm>

namespace lfmfast {

namespace {

// Waiting for a prefix that another request is reading is worth it from this many tokens on.
constexpr size_t n_worth_waiting = 16;
// An idle sequence that shares a prompt's beginning is written to host memory before it is cut back by more than this.
constexpr size_t n_worth_saving = 4;

size_t common_prefix(const std::vector<int32_t> & a, size_t n_a, const std::vector<int32_t> & b) {
    const size_t n = std::min(n_a, b.size());
    return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first - a.begin());
}

template <typename T> std::shared_ptr<const std::vector<T>> shared(std::vector<T> && data) {
    return std::make_shared<const std::vector<T>>(std::move(data));
}

}  // namespace

engine::resume_point engine::find(const std::vector<int32_t> & prompt, bool inexact) {
    resume_point out;
    out.match    = tree_.match(prompt.data(), prompt.size());
    size_t there = out.match.n_rows;  // tokens whose attention memory is somewhere
    for (const auto & slot : slots_) {
        const bool usable = slot.keep && (slot.exact || (inexact && !slot.s));
        out.common.push_back(usable ? common_prefix(slot.want, slot.n_held, prompt) : 0);
        there = std::max(there, out.common.back());
    }
    const size_t limit = prompt.size() - 1;  // the last token must be read to get its logits, unless they are kept
    for (const auto & point : out.match.points) {
        const bool whole = point.n_tokens == prompt.size() && point.logits;
        if ((params_.can_cut || point.checkpoint) && point.n_tokens <= there && (point.n_tokens <= limit || whole)) {
            out.n     = point.n_tokens;
            out.point = point;
        }
    }
    if (params_.can_cut && out.n < std::min(there, limit)) {
        out.n     = std::min(there, limit);
        out.point = {};
    }
    for (const auto & slot : slots_) {  // an idle sequence goes on from its end
        const size_t common = out.common[static_cast<size_t>(slot.id)];
        if (!slot.s && slot.n_held == common && common > out.n && common <= limit) {
            out.n     = common;
            out.point = {};
        }
    }
    return out;
}

// Whether another request is reading a prefix that this one shares: then it waits, and both use it.
bool engine::must_wait(const request & r, const resume_point & from) {
    bool wait = false;
    for (auto & slot : slots_) {
        if (!slot.s || !slot.keep || !slot.exact || slot.n_held >= slot.n_prompt || slot.s->stop_.asked()) {
            continue;
        }
        const size_t common = common_prefix(r.prompt, r.prompt.size(), {slot.want.begin(), slot.want.begin() +
                                            static_cast<std::ptrdiff_t>(slot.n_prompt)});
        const bool   same   = common == r.prompt.size() && common == slot.n_prompt;
        const size_t usable = same ? common : std::min(common, r.prompt.size() - 1);
        if (usable < from.n + n_worth_waiting || slot.n_held >= usable) {
            continue;
        }
        if (!same && !params_.can_cut && usable < slot.n_prompt) {
            const auto at = std::lower_bound(slot.cuts.begin(), slot.cuts.end(), usable);
            if (at == slot.cuts.end() || *at != usable) {
                slot.cuts.insert(at, usable);
            }
        }
        wait = true;
    }
    return wait;
}

void engine::start(slot & slot, std::shared_ptr<stream> s, const resume_point & from) {
    const request & r = s->request_;
    const int64_t   now = now_us();
    size_t          n = 0;
    bool            exact = true;
    const auto      in_place = [&] {  // after reuse(): the place is empty if that failed
        return from.n > 0 && slot.keep && slot.n_held >= from.n && from.common[static_cast<size_t>(slot.id)] >= from.n;
    };
    if (reuse(slot, r, from.n, n)) {
        exact = false;
    } else if (in_place() && trim(slot, from.n, from.point)) {
        n     = from.n;
        exact = slot.exact;
    } else {
        save(slot);
        clear(slot);
        if (from.n > 0 && fill(slot, r.prompt, from)) {
            n = from.n;
        }
    }
    logits_ptr logits = n == r.prompt.size() ? from.point.logits : nullptr;
    slot.want         = r.prompt;
    slot.n_prompt     = r.prompt.size();
    slot.n_held       = n;
    slot.n_checked    = n;
    slot.keep         = true;
    slot.exact        = exact;
    slot.alone        = false;
    slot.logits_us    = 0;
    slot.to_pin       = r.pin && n == r.prompt.size() ? from.point : prefix_point();
    slot.last_used    = ++clock_;
    slot.cuts.clear();
    if (!params_.can_cut && slot.keep && n < slot.n_prompt) {
        std::vector<size_t> starts, branches;
        for (size_t i = n; i < slot.n_prompt; ++i) {
            if (r.prompt[i] == start_token_) {
                starts.push_back(i);
            }
        }
        branches.push_back(from.match.n_tokens);
        branches.insert(branches.end(), from.common.begin(), from.common.end());
        slot.cuts = choose_cuts(n, slot.n_prompt, static_cast<size_t>(decoder_->n_ubatch()), starts, branches);
    }
    s->started_us_     = now;
    s->times_.wait_us  = now - s->submitted_us_;
    s->times_.n_prompt = static_cast<int64_t>(slot.n_prompt);
    s->times_.n_cached = static_cast<int64_t>(n);
    s->n_read_.store(static_cast<int64_t>(n), std::memory_order_release);
    ++counts_.n_requests;
    counts_.n_prompt += s->times_.n_prompt;
    counts_.n_cached += s->times_.n_cached;
    slot.s = std::move(s);
    if (n == slot.n_prompt) {  // its logits are kept: there is nothing to read
        stream & out         = *slot.s;
        out.first_us_        = now_us();
        out.times_.prompt_us = out.first_us_ - now;
        slot.logits_us       = out.first_us_;
        out.next_logits_     = logits->data();
        sample({&slot});
    }
}

bool engine::trim(slot & slot, size_t n, const prefix_point & point) {
    if (n == slot.n_held) {
        return true;
    }
    if (slot.n_held > n + n_worth_saving) {
        save(slot);
    }
    try {
        if (params_.can_cut) {
            if (decoder_->seq_pos_min(slot.id) != 0) {  // a sliding window dropped what would be needed
                return false;
            }
        } else if (point.checkpoint) {
            slot.keep = false;  // with the state of another position it must not get into the tree
            decoder_->state_seq_set(slot.id, point.checkpoint->data(), point.checkpoint->size(), true);
        } else {
            return false;
        }
        slot.keep = decoder_->seq_rm(slot.id, static_cast<int64_t>(n), -1);
        return slot.keep;
    } catch (const error &) {
        return false;
    }
}

bool engine::fill(slot & slot, const std::vector<int32_t> & tokens, const resume_point & from) {
    const int64_t start = now_us();
    try {
        prefix_point point = from.point;
        if (from.match.n_rows < from.n) {  // only a sequence of the context has them
            for (auto & other : slots_) {
                if (other.id != slot.id && other.keep && from.common[static_cast<size_t>(other.id)] >= from.n && save(other)) {
                    break;
                }
            }
            const auto match = tree_.match(tokens.data(), from.n);
            if (match.n_rows < from.n) {
                return false;
            }
            if (!params_.can_cut && !point.checkpoint && !match.points.empty() && match.points.back().n_tokens == from.n) {
                point = match.points.back();
            }
        }
        if (!params_.can_cut && !point.checkpoint) {
            return false;
        }
        const auto state = compose_kv_state(layout_, n_stream_, tree_.rows(tokens.data(), from.n),
                                            point.checkpoint ? *point.checkpoint : std::vector<uint8_t>());
        decoder_->state_seq_set(slot.id, state.data(), state.size(), false);
        ++counts_.n_loaded;
        counts_.copy_us += now_us() - start;
        return true;
    } catch (const error &) {
        clear(slot);
        return false;
    }
}

// After a failed pass the sequence is in an unknown state: back to the last point that is known, or to nothing.
void engine::rebuild(slot & slot) {
    const auto match = tree_.match(slot.want.data(), slot.n_held);
    size_t     n     = params_.can_cut ? slot.n_held : 0;
    prefix_point point;
    if (slot.keep && slot.exact) {
        for (const auto & p : match.points) {
            if (!params_.can_cut && p.checkpoint && p.n_tokens <= slot.n_held) {
                n     = p.n_tokens;
                point = p;
            }
        }
    }
    try {
        if (n > 0 && !params_.can_cut) {
            decoder_->state_seq_set(slot.id, point.checkpoint->data(), point.checkpoint->size(), true);
        }
        if (n > 0 && decoder_->seq_rm(slot.id, static_cast<int64_t>(n), -1)) {
            slot.n_held    = n;
            slot.n_checked = n;
            return;
        }
    } catch (const error &) {
    }
    auto want = slot.want;
    clear(slot);
    slot.want = std::move(want);
}

void engine::checkpoint(slot & slot, const float * logits) {
    if (!slot.keep || !slot.exact || slot.n_held == 0 || (params_.can_cut && logits == nullptr)) {
        return;
    }
    slot.n_checked = slot.n_held;
    bytes_ptr  state;
    logits_ptr row;
    if (!params_.can_cut) {
        state = shared(decoder_->state_seq_get(slot.id, true));
    }
    if (logits != nullptr) {
        row = shared(std::vector<float>(logits, logits + vocab_->n_vocab()));
    }
    if (row && slot.s && slot.s->request_.pin) {
        slot.to_pin = {slot.n_held, state, row};
    }
    tree_.put_point(slot.want.data(), slot.n_held, std::move(state), std::move(row));
}

bool engine::save(slot & slot) {
    if (!slot.keep || !slot.exact || slot.n_held == 0) {
        return false;
    }
    const auto match = tree_.match(slot.want.data(), slot.n_held);
    if (match.n_rows == slot.n_held) {
        return true;
    }
    if (layout_known_ && layout_.row_size() * slot.n_held > tree_.max_bytes()) {
        ++counts_.n_unsaved;
        return false;
    }
    const int64_t start = now_us();
    try {
        auto state = parse_kv_state(decoder_->state_seq_get(slot.id, false), slot.n_held, match.n_rows);
        set_layout(state.layout);
        tree_.put_rows(slot.want.data(), match.n_rows, slot.n_held, state.rows.data());
        if (!slot.s && !params_.can_cut) {
            tree_.put_point(slot.want.data(), slot.n_held, shared(partial_state(state.recurrent)), nullptr);
        }
    } catch (const error &) {  // a memory that is no plain one (sliding window): it serves from its place only
        ++counts_.n_unsaved;
        return false;
    }
    ++counts_.n_saved;
    counts_.copy_us += now_us() - start;
    return tree_.match(slot.want.data(), slot.n_held).n_rows == slot.n_held;
}

void engine::set_layout(const kv_layout & layout) {
    if (layout_known_ && layout != layout_) {
        throw error(error_code::internal, "the layout of the attention memory changed");
    }
    layout_       = layout;
    layout_known_ = true;
    tree_.set_row_size(layout.row_size());
}

void engine::clear(slot & slot) {
    slot.n_held    = 0;
    slot.n_checked = 0;
    slot.exact     = true;
    slot.want.clear();
    if (!decoder_->seq_rm(slot.id, -1, -1)) {
        throw error(error_code::internal, "sequence " + std::to_string(slot.id) + " can't be cleared", slot.id);
    }
}

// --- places ------------------------------------------------------------------------------------------------------------

bool engine::move(slot & from, slot & to) {
    const int64_t start = now_us();
    save(to);
    clear(to);
    try {
        const auto state = decoder_->state_seq_get(from.id, false);
        decoder_->state_seq_set(to.id, state.data(), state.size(), false);
    } catch (const error &) {
        clear(to);
        return false;
    }
    const int32_t from_id = from.id, to_id = to.id;
    std::swap(from, to);
    from.id = from_id;
    to.id   = to_id;
    clear(from);
    ++counts_.n_moved;
    counts_.copy_us += now_us() - start;
    return true;
}

void engine::close_gaps() {
    for (;;) {
        std::vector<sequence_size> sizes;
        for (const auto & slot : slots_) {
            if (slot.s) {
                sizes.push_back({slot.id, slot.n_held});
            }
        }
        const auto next = closing_move(sizes);
        if (!next) {
            return;
        }
        auto & from = slots_[static_cast<size_t>(next->from)];
        auto & to   = slots_[static_cast<size_t>(next->to)];
        if (from.n_held == 0) {  // it has not begun: only the request moves
            save(to);
            clear(to);
            std::swap(from, to);
            std::swap(from.id, to.id);
            clear(from);
            continue;
        }
        if (!move(from, to)) {
            return;  // a gap costs time, nothing else
        }
    }
}

// More sequences, for the requests that wait: a new context, into which everything moves.
void engine::grow() {
    size_t n_wanted = running().size();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        n_wanted += queue_.size();
    }
    size_t n = slots_.size();
    while (n < n_wanted && static_cast<int64_t>(n) < params_.n_parallel_max) {
        n = std::min<size_t>(2 * n, static_cast<size_t>(params_.n_parallel_max));
    }
    if (n == slots_.size()) {
        return;
    }
    struct moved {
        kv_state             state;
        std::vector<uint8_t> partial;
    };
    std::vector<moved> states(slots_.size());
    std::unique_ptr<decoder> next;
    uint32_t                 n_stream = 1;
    try {
        for (auto & slot : slots_) {
            if (slot.s && slot.n_held > 0) {
                auto & m = states[static_cast<size_t>(slot.id)];
                m.state  = parse_kv_state(decoder_->state_seq_get(slot.id, false), slot.n_held);
                set_layout(m.state.layout);
                if (!params_.can_cut) {
                    m.partial = partial_state(m.state.recurrent);
                }
            } else if (!slot.s) {
                save(slot);
            }
        }
        if (!layout_known_) {
            return;  // nothing was read yet; after the next pass it is known how much memory more would take
        }
        const size_t each = layout_.row_size() * static_cast<size_t>(n_ctx_);
        n = std::min(n, static_cast<size_t>(params_.growth_bytes) / std::max<size_t>(each, 1));
        if (n <= slots_.size()) {
            params_.n_parallel_max = static_cast<int64_t>(slots_.size());
            return;
        }
        next     = make_decoder_(static_cast<int64_t>(n));
        n_stream = kv_n_stream(next->state_seq_get(0, false));
    } catch (const std::exception &) {  // no memory for more, or a memory that can't be moved: it stays as it is
        params_.n_parallel_max = static_cast<int64_t>(slots_.size());
        return;
    }
    std::vector<slot> old(n);
    decoder_  = std::move(next);
    halved_   = false;
    governor_ = {};
    n_stream_ = n_stream;
    old.swap(slots_);
    for (size_t i = 0; i < n; ++i) {
        slots_[i].id = static_cast<int32_t>(i);
    }
    size_t at = 0;
    for (auto & slot : old) {
        if (!slot.s) {
            continue;
        }
        auto & m    = states[static_cast<size_t>(slot.id)];
        auto & here = slots_[at];
        here        = std::move(slot);
        here.id     = static_cast<int32_t>(at++);
        if (here.n_held > 0) {
            try {
                const auto state = compose_kv_state(layout_, n_stream_, {{m.state.rows.data(), here.n_held}}, m.partial);
                decoder_->state_seq_set(here.id, state.data(), state.size(), false);
            } catch (const std::exception &) {  // then it is read again
                here.n_held    = 0;
                here.n_checked = 0;
            }
        }
    }
}

}  // namespace lfmfast
