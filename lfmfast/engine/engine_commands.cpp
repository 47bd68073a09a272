// What is asked of the engine's loop between two passes.
#include "engine/engine.h"

#include <algorithm>

namespace lfmfast {

void engine::on_loop(const std::function<void()> & what) {
    std::exception_ptr failure;
    job mine;
    mine.run = [&] {
        try {
            what();
        } catch (...) {
            failure = std::current_exception();
        }
    };
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) {
        throw error(error_code::closed, "the model was closed");
    }
    jobs_.push_back(&mine);
    work_.notify_one();
    job_done_.wait(lock, [&] { return mine.done || ended_; });
    if (failure) {
        std::rethrow_exception(failure);
    }
    if (!mine.done) {
        throw error(error_code::closed, "the model was closed");
    }
}

engine_stats engine::stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    engine_stats out = stats_;
    out.n_queued     = static_cast<int64_t>(queue_.size());
    return out;
}

void engine::forget() {
    on_loop([this] {
        tree_.clear();
        for (auto & slot : slots_) {
            if (!slot.s) {
                clear(slot);
            }
        }
    });
}

bool engine::unpin(const std::vector<int32_t> & prompt) {
    bool was = false;
    on_loop([&] { was = tree_.unpin(prompt.data(), prompt.size()); });
    return was;
}

saved_prefix engine::save(const std::vector<int32_t> & tokens) {
    saved_prefix out;
    on_loop([&] {
        auto longer = tokens;
        longer.push_back(-1);  // so that the whole of `tokens` counts, not all but its last one
        const auto from = find(longer);
        if (from.n == 0) {
            throw error(error_code::state, "nothing is kept of these " + std::to_string(tokens.size()) +
                        " tokens: read them first, with warm() for instance");
        }
        if (from.match.n_rows < from.n) {
            for (auto & slot : slots_) {
                if (from.common[static_cast<size_t>(slot.id)] >= from.n && save(slot)) {
                    break;
                }
            }
        }
        const auto match = tree_.match(tokens.data(), from.n);
        if (match.n_rows < from.n) {
            throw error(error_code::state, "the " + std::to_string(from.n) + " tokens can't be copied out of the context, or the "
                        "cache of " + std::to_string(params_.cache_bytes) + " bytes is too small for them",
                        static_cast<int64_t>(from.n));
        }
        out.tokens.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(from.n));
        out.layout = layout_to_bytes(layout_);
        for (const auto & rows : tree_.rows(tokens.data(), from.n)) {
            out.rows.insert(out.rows.end(), rows.data, rows.data + rows.n_tokens * layout_.row_size());
        }
        for (const auto & point : match.points) {
            if (point.checkpoint) {
                out.points.push_back({point.n_tokens, *point.checkpoint});
            }
            if (point.logits && point.n_tokens == from.n) {
                out.logits = *point.logits;
            }
        }
    });
    return out;
}

void engine::load(const saved_prefix & saved, bool pin) {
    on_loop([&] {
        const size_t n = saved.tokens.size();
        const auto refuse = [](const std::string & why) { throw error(error_code::state, "the saved prefix is refused: " + why); };
        if (n == 0 || n > static_cast<size_t>(n_ctx_)) {
            refuse("it has " + std::to_string(n) + " tokens, the context holds " + std::to_string(n_ctx_));
        }
        for (const int32_t token : saved.tokens) {
            if (token < 0 || token >= vocab_->n_vocab()) {
                refuse("token " + std::to_string(token) + " is not in the vocabulary");
            }
        }
        learn_layout();
        if (layout_from_bytes(saved.layout) != layout_) {
            refuse("it was made with another model, or with other types of the KV cache or of flash attention");
        }
        if (saved.rows.size() != n * layout_.row_size()) {
            refuse("it has " + std::to_string(saved.rows.size()) + " bytes for " + std::to_string(n) + " tokens");
        }
        if (!saved.logits.empty() && saved.logits.size() != static_cast<size_t>(vocab_->n_vocab())) {
            refuse("it has logits of " + std::to_string(saved.logits.size()) + " tokens");
        }
        for (const auto & point : saved.points) {
            if (params_.can_cut || point.n_tokens == 0 || point.n_tokens > n || point.checkpoint.size() < 8) {
                refuse("its recurrent states are not this model's");
            }
        }
        // llama.cpp has the last word: one point after another, in a place that is free.
        for (auto & slot : slots_) {
            if (slot.s) {
                continue;
            }
            save(slot);
            clear(slot);
            const auto try_state = [&](const std::vector<uint8_t> & state, bool partial) {
                decoder_->state_seq_set(slot.id, state.data(), state.size(), partial);
            };
            for (const auto & point : saved.points) {
                try_state(point.checkpoint, true);
            }
            try_state(compose_kv_state(layout_, n_stream_, {{saved.rows.data(), n}},
                                       saved.points.empty() ? std::vector<uint8_t>() : saved.points.back().checkpoint), false);
            clear(slot);
            break;
        }
        tree_.put_rows(saved.tokens.data(), tree_.match(saved.tokens.data(), n).n_rows, n,
                       saved.rows.data() + tree_.match(saved.tokens.data(), n).n_rows * layout_.row_size());
        for (const auto & point : saved.points) {
            tree_.put_point(saved.tokens.data(), point.n_tokens, std::make_shared<const std::vector<uint8_t>>(point.checkpoint), nullptr);
        }
        if (!saved.logits.empty()) {
            tree_.put_point(saved.tokens.data(), n, nullptr, std::make_shared<const std::vector<float>>(saved.logits));
        }
        if (tree_.match(saved.tokens.data(), n).n_rows < n) {
            refuse("its " + std::to_string(saved.rows.size()) + " bytes do not fit in the cache of " +
                   std::to_string(params_.cache_bytes));
        }
        if (pin) {
            (void) tree_.pin(saved.tokens.data(), n);
        }
    });
}

// From a pass of one token, when nothing was read yet.
void engine::learn_layout() {
    if (layout_known_) {
        return;
    }
    for (auto & slot : slots_) {
        if (slot.s) {
            continue;
        }
        save(slot);
        if (!layout_known_) {
            clear(slot);
            batch_->clear();
            batch_->add(0, 0, {slot.id}, true);
            decoder_->decode(*batch_, &stop_all_, nullptr);
            set_layout(parse_kv_state(decoder_->state_seq_get(slot.id, false), 1).layout);
            clear(slot);
        }
        return;
    }
    throw error(error_code::state, "all sequences are busy and none was kept yet: try again when one is free");
}

}  // namespace lfmfast
