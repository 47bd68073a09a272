// One pass of the engine: what it computes, what comes of it, and what happens when it fails.
#include "engine/engine.h"

#include "engine/sampler_pool.h"

#include <algorithm>

namespace lfmfast {

namespace {

// A step of one sequence is let finish after a cancel unless it takes longer than this: then the sequence stays whole.
constexpr int64_t token_grace_us = 200'000;
// Less sampling than this is done sooner by one thread than by waking others.
constexpr int64_t parallel_sampling_us = 200;

}  // namespace

void engine::pass() {
    std::vector<sequence_view> views;
    for (const auto & slot : slots_) {
        if (slot.s) {
            sequence_view v;
            v.id        = slot.id;
            v.n_pending = slot.want.size() - slot.n_held;
            v.order     = slot.s->order_;
            v.alone     = slot.alone;
            const auto cut = std::upper_bound(slot.cuts.begin(), slot.cuts.end(), slot.n_held);
            if (cut != slot.cuts.end()) {
                v.n_to_cut = *cut - slot.n_held;
            }
            views.push_back(v);
        }
    }
    const auto items = scheduler_->next(views);
    if (items.empty()) {
        return;
    }
    batch_->clear();
    for (const auto & item : items) {
        const slot & slot = slots_[static_cast<size_t>(item.id)];
        for (size_t i = slot.n_held; i < slot.n_held + item.n_tokens; ++i) {
            batch_->add(slot.want[i], static_cast<int64_t>(i), {item.id}, i + 1 == slot.want.size());
        }
    }
    // A cancel stops a pass that reads one prompt at once; of a step only its own, and only if it takes long.
    stop_request * stop = nullptr;
    if (items.size() == 1) {
        stop = &slots_[static_cast<size_t>(items[0].id)].s->stop_;
        stop->grace_us.store(items[0].n_tokens > 1 ? 0 : token_grace_us);
    }
    const int64_t start = now_us();
    for (const auto & item : items) {
        slot & slot = slots_[static_cast<size_t>(item.id)];
        if (slot.s->first_us_ != 0 && slot.logits_us != 0) {
            slot.s->times_.outside_us.push_back(static_cast<int32_t>(std::min<int64_t>(start - slot.logits_us, INT32_MAX)));
        }
    }
    try {
        decoder_->decode(*batch_, stop, &stop_all_);
    } catch (const error & e) {
        failed_pass(items, e);
        return;
    }
    read(items, start, now_us());
}

void engine::read(const std::vector<pass_item> & items, int64_t start, int64_t end_us) {
    scheduler_->measured(items, end_us - start);
    govern(items, end_us - start);
    const bool prompt_pass = items.size() == 1 && items[0].n_tokens > 1;
    ++(prompt_pass ? counts_.n_prompt_passes : counts_.n_steps);
    (prompt_pass ? counts_.prompt_us : counts_.step_us) += end_us - start;
    const float *       logits = decoder_->logits();
    const auto          n_row  = static_cast<size_t>(vocab_->n_vocab());
    size_t              row    = 0;
    std::vector<slot *> out;
    for (const auto & item : items) {
        slot &   slot = slots_[static_cast<size_t>(item.id)];
        stream & s    = *slot.s;
        slot.n_held += item.n_tokens;
        if (s.first_us_ != 0) {
            s.times_.decode_us += end_us - start;
        } else {
            s.n_read_.store(static_cast<int64_t>(std::min(slot.n_held, slot.n_prompt)), std::memory_order_release);
        }
        if (slot.n_held < slot.want.size()) {
            const bool cut = std::binary_search(slot.cuts.begin(), slot.cuts.end(), slot.n_held);
            if (cut || slot.n_held - slot.n_checked >= static_cast<size_t>(params_.checkpoint_tokens)) {
                checkpoint(slot);
            }
            continue;
        }
        const float * mine = logits + row++ * n_row;
        slot.alone = false;
        slot.logits_us = end_us;
        if (s.first_us_ == 0) {
            s.first_us_        = end_us;
            s.times_.prompt_us = end_us - s.started_us_;
            checkpoint(slot, mine);
        } else if (slot.n_held - slot.n_checked >= static_cast<size_t>(params_.checkpoint_tokens)) {
            checkpoint(slot);
        }
        s.next_logits_ = mine;
        out.push_back(&slot);
    }
    sample(out);
}

void engine::govern(const std::vector<pass_item> & items, int64_t us) {
    if (params_.n_threads < 2 && params_.n_threads_batch < 2) {
        return;
    }
    counts_.n_halved_passes += halved_ ? 1 : 0;
    governor_.measured(items.size(), items[0].n_tokens, us);
    if (governor_.halved() != halved_) {
        halved_ = !halved_;
        const int64_t part = halved_ ? 2 : 1;
        decoder_->set_n_threads((params_.n_threads + part - 1) / part, (params_.n_threads_batch + part - 1) / part);
    }
}

void engine::sample(const std::vector<slot *> & out) {
    const int64_t start = now_us();
    std::vector<stream *> picking;
    for (slot * slot : out) {
        if (slot->s->request_.max_tokens != 0) {
            picking.push_back(slot->s.get());
        }
    }
    run_parallel(picking.size(), last_sample_us_ < parallel_sampling_us ? 1 : static_cast<size_t>(params_.n_threads),
                 [&](size_t i) { picking[i]->pick(picking[i]->next_logits_, *vocab_); });
    last_sample_us_ = 0;
    for (const stream * s : picking) {
        last_sample_us_ += s->last_pick_us_;
    }
    counts_.sample_us += now_us() - start;
    std::vector<slot *>                            going_on;
    std::vector<std::pair<slot *, finish_reason>>  ending;
    for (slot * slot : out) {
        stream & s = *slot->s;
        const int64_t wait_ms = s.request_.max_prompt_ms;
        if (s.times_.n_predicted == 0 && wait_ms >= 0 && s.first_us_ - s.submitted_us_ > wait_ms * 1000) {
            const error late = past_deadline(wait_ms);
            end(*slot, finish_reason::failed, &late);
            continue;
        }
        if (s.request_.max_tokens == 0) {
            ending.emplace_back(slot, finish_reason::length);
            continue;
        }
        try {
            auto          step  = s.take(*vocab_);
            const int64_t limit = s.request_.max_predict_ms;
            if (step == stream::step::more && (static_cast<int64_t>(slot->want.size()) >= n_ctx_ ||
                                               (limit >= 0 && now_us() - s.first_us_ >= limit * 1000))) {
                step = stream::step::length;
            }
            if (step == stream::step::more) {
                slot->want.push_back(s.last_token_);
                going_on.push_back(slot);
            } else {
                ending.emplace_back(slot, step == stream::step::stop ? finish_reason::stop : finish_reason::length);
            }
        } catch (const error & e) {
            end(*slot, finish_reason::failed, &e);
        }
    }
    publish();  // who gets a token finds its request among those that run
    // All at once, so that who waits for several of them is woken once; and before the work that ends cause.
    for (slot * slot : going_on) {
        slot->s->hand_over();
    }
    for (slot * slot : going_on) {
        slot->s->announce();
    }
    for (const auto & [slot, reason] : ending) {
        end(*slot, reason);
    }
}

void engine::failed_pass(const std::vector<pass_item> & items, const error & e) {
    ++counts_.n_failed_passes;
    for (const auto & item : items) {
        slot &     slot  = slots_[static_cast<size_t>(item.id)];
        const bool again = slot.alone;
        rebuild(slot);
        if (slot.s->stop_.asked() || stop_all_.asked()) {
            end(slot, finish_reason::cancelled);
        } else if (again && items.size() == 1) {
            end(slot, finish_reason::failed, &e);
        } else {
            slot.alone = true;
        }
    }
}

}  // namespace lfmfast
