// Reuse of runs of tokens behind a part that was taken out (llama-server's --cache-reuse): the attention memory of a run is
// moved to its new positions. Inexact: what was computed for those tokens had seen the part that is gone. So it is done for
// requests that ask for it only, and what it gives is never shared through the tree.
//
// A hybrid model also needs the recurrent state at the end of the last run. LFM2's is the last two columns of each short
// convolution, so the state that was kept there, or that stands at the sequence's end, is right but for the same reason.
#include "engine/engine.h"

#include <algorithm>

namespace lfmfast {

// The runs of at least n_min tokens of the prompt that the sequence holds, in order, the last one ending where it can be gone
// on from.
engine::reuse_plan engine::find_runs(const slot & slot, const std::vector<int32_t> & prompt, size_t n_min) {
    reuse_plan plan;
    const auto & held = slot.want;
    size_t at = 0, from = 0;  // in the prompt, in the sequence
    while (at + 1 < prompt.size() && from < slot.n_held) {
        size_t n = 0;
        while (at + n + 1 < prompt.size() && from + n < slot.n_held && prompt[at + n] == held[from + n]) {
            ++n;
        }
        if (n >= n_min) {
            plan.runs.push_back({from, at, n});
            at += n;
            from += n;
        } else {
            ++from;
        }
    }
    if (params_.can_cut) {
        plan.n = plan.runs.empty() ? 0 : plan.runs.back().at + plan.runs.back().n;
        return plan;
    }
    const auto points = tree_.match(held.data(), slot.n_held).points;
    for (; !plan.runs.empty(); plan.runs.pop_back()) {
        auto &       last = plan.runs.back();
        const size_t stop = last.from + last.n;
        size_t       end  = stop == slot.n_held ? stop : 0;
        for (const auto & point : points) {
            if (slot.exact && end != stop && point.checkpoint && point.n_tokens <= stop && point.n_tokens >= last.from + n_min) {
                end             = point.n_tokens;
                plan.checkpoint = point.checkpoint;
            }
        }
        if (end != 0) {
            last.n = end - last.from;
            plan.n = last.at + last.n;
            if (end == slot.n_held) {
                plan.checkpoint.reset();
            }
            return plan;
        }
    }
    return plan;
}

// Makes the sequence hold the first plan.n tokens of the prompt. False: it could not, and is in an unknown state.
bool engine::move_runs(slot & slot, const reuse_plan & plan) {
    try {
        const auto & last = plan.runs.back();
        const size_t end  = last.from + last.n;
        if (plan.checkpoint) {
            decoder_->state_seq_set(slot.id, plan.checkpoint->data(), plan.checkpoint->size(), true);
        }
        if (end < slot.n_held && !decoder_->seq_rm(slot.id, static_cast<int64_t>(end), -1)) {
            return false;
        }
        for (const auto & run : plan.runs) {
            if (run.at == run.from) {
                continue;
            }
            const auto at = static_cast<int64_t>(run.at), from = static_cast<int64_t>(run.from);
            if (!decoder_->seq_rm(slot.id, at, from)) {
                return false;
            }
            decoder_->seq_add(slot.id, from, from + static_cast<int64_t>(run.n), at - from);
        }
        return true;
    } catch (const error &) {
        return false;
    }
}

// If the place has more of the prompt in runs than the n_exact tokens that can be had exactly: moves them.
bool engine::reuse(slot & slot, const request & r, size_t n_exact, size_t & n) {
    if (r.n_cache_reuse <= 0 || !slot.keep || slot.n_held == 0 || !decoder_->can_shift()) {
        return false;
    }
    const auto plan = find_runs(slot, r.prompt, static_cast<size_t>(r.n_cache_reuse));
    if (plan.n <= n_exact) {
        return false;
    }
    save(slot);
    if (!move_runs(slot, plan)) {
        clear(slot);
        return false;
    }
    n = plan.n;
    return true;
}

}  // namespace lfmfast
