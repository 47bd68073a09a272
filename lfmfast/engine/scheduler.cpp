#include "engine/scheduler.h"

#include <algorithm>

namespace lfmfast {

namespace {

constexpr size_t  n_chunk_min     = 16;  // a shorter chunk costs nearly as much
constexpr size_t  n_chunk_unknown = 64;  // before anything was measured
constexpr size_t  n_in_steps      = 2;   // a prompt's last tokens go along with steps rather than in a pass of their own
constexpr size_t  n_branch_gap    = 32;  // fewer tokens are not worth a pass
constexpr size_t  n_start_gap     = 64;

}  // namespace

size_t scheduler::chunk_limit(bool others_generate) const {
    if (!others_generate) {
        return n_ubatch_;
    }
    if (us_per_token_ <= 0.0) {
        return std::min(n_ubatch_, n_chunk_unknown);
    }
    const double n = static_cast<double>(max_stall_us_) / us_per_token_;
    return n >= static_cast<double>(n_ubatch_) ? n_ubatch_ : std::min(n_ubatch_, std::max(n_chunk_min, static_cast<size_t>(n)));
}

std::vector<pass_item> scheduler::next(const std::vector<sequence_view> & running) {
    const auto earlier = [](const sequence_view * a, const sequence_view & b) { return a == nullptr || b.order < a->order; };
    const sequence_view * alone = nullptr;
    const sequence_view * first = nullptr;  // of those that read a prompt
    bool    generating = false;
    int32_t low = INT32_MAX, high = -1;     // of those that a step is for
    for (const auto & s : running) {
        if (s.alone) {
            alone = earlier(alone, s) ? &s : alone;
        } else if (s.n_pending <= n_in_steps) {
            generating = generating || s.n_pending == 1;
            low        = std::min(low, s.id);
            high       = std::max(high, s.id);
        }
    }
    for (const auto & s : running) {
        if (!s.alone && s.n_pending > (generating ? n_in_steps : 1) && earlier(first, s)) {
            first = &s;
        }
    }
    if (alone != nullptr) {
        return {{alone->id, std::min({alone->n_pending, alone->n_to_cut, n_ubatch_})}};
    }
    if (first != nullptr && !(generating && prompt_last_)) {
        prompt_last_ = true;
        const size_t n     = std::min(first->n_pending, first->n_to_cut);
        const size_t limit = chunk_limit(generating);
        // A remainder of less than half a chunk goes along: a pass of its own would cost more than the stall it saves.
        return {{first->id, n <= limit + limit / 2 ? std::min(n, n_ubatch_) : limit}};
    }
    prompt_last_ = false;
    std::vector<pass_item> step;
    for (const auto & s : running) {
        // A prompt between two of them gives a token too: without it the step would fall in two passes.
        if (s.n_pending <= n_in_steps || (s.id > low && s.id < high)) {
            step.push_back({s.id, 1});
        }
    }
    return step;
}

void scheduler::measured(const std::vector<pass_item> & pass, int64_t us) {
    if (pass.size() == 1 && pass[0].n_tokens >= n_chunk_min) {
        const double each = static_cast<double>(us) / static_cast<double>(pass[0].n_tokens);
        us_per_token_     = us_per_token_ <= 0.0 ? each : 0.7 * us_per_token_ + 0.3 * each;
    }
}

std::vector<int32_t> free_places(const std::vector<int32_t> & running, int32_t n_slots) {
    std::vector<int32_t> places;
    if (running.empty()) {
        for (int32_t id = 0; id < n_slots; ++id) {
            places.push_back(id);
        }
        return places;
    }
    for (size_t i = 1; i < running.size(); ++i) {
        for (int32_t id = running[i - 1] + 1; id < running[i]; ++id) {
            places.push_back(id);
        }
    }
    if (places.empty()) {
        if (running.front() > 0) {
            places.push_back(running.front() - 1);
        }
        if (running.back() + 1 < n_slots) {
            places.push_back(running.back() + 1);
        }
    }
    return places;
}

std::optional<sequence_move> closing_move(const std::vector<sequence_size> & running) {
    for (size_t i = 1; i < running.size(); ++i) {
        if (running[i].id > running[i - 1].id + 1) {
            // To the side of the gap where it stays: next to the others.
            const bool front = running.front().n_tokens < running.back().n_tokens;
            return front ? sequence_move{running.front().id, running[i].id - 1}
                         : sequence_move{running.back().id, running[i - 1].id + 1};
        }
    }
    return std::nullopt;
}

std::vector<size_t> choose_cuts(size_t n_held, size_t n_prompt, size_t n_ubatch, const std::vector<size_t> & starts,
                                const std::vector<size_t> & branches) {
    std::vector<size_t> forced;
    for (const size_t at : branches) {
        if (at >= n_held + n_branch_gap && at < n_prompt) {
            forced.push_back(at);
        }
    }
    if (starts.size() >= 2) {
        const size_t question = starts[starts.size() - 2];
        if (question >= n_held + n_start_gap && question < n_prompt) {
            forced.push_back(question);
        }
    }
    forced.push_back(n_prompt);
    std::sort(forced.begin(), forced.end());
    forced.erase(std::unique(forced.begin(), forced.end()), forced.end());
    std::vector<size_t> cuts;
    size_t from = n_held;
    for (const size_t to : forced) {
        while (to - from > n_ubatch) {  // several passes: end them at starts of messages if that takes no more of them
            const auto   passes = [&](size_t at) { return (to - at + n_ubatch - 1) / n_ubatch; };
            const size_t whole  = from + n_ubatch;
            size_t       end    = whole;
            for (const size_t at : starts) {
                if (at > from && at < whole && passes(at) == passes(whole)) {
                    end = at;
                }
            }
            if (end != whole) {
                cuts.push_back(end);
            }
            from = end;
        }
        if (to != n_prompt) {
            cuts.push_back(to);
        }
        from = to;
    }
    return cuts;
}

}  // namespace lfmfast
