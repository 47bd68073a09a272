#include "engine/thread_governor.h"

#include <algorithm>

namespace lfmfast {

namespace {

constexpr double slow_ratio  = 3.0;    // on average so many times the usual is suspicious;
constexpr double cut_ratio   = 8.0;    // one slow pass, however slow, is not
constexpr double slow_us     = 5'000;  // less than this over the usual counts as usual
constexpr double much_better = 0.7;    // half the threads are kept for no less
constexpr double drift       = 1.002;  // passes grow with the context: the usual follows slowly
constexpr double weight      = 0.25;   // of the newest pass in an average
constexpr int    n_trial = 4, n_probe = 2, n_hold_first = 16, n_hold_max = 64;

// Passes of about the same work: steps by their sequences, chunks of prompts by the power of two of their tokens.
size_t kind(size_t n_seq, size_t n_tokens) {
    size_t log = 0;
    for (size_t n = n_tokens; n > 1; n /= 2) {
        ++log;
    }
    return n_tokens == 1 ? n_seq : 1000 + log;
}

}  // namespace

void thread_governor::enter(state next, int n_passes) {
    state_    = next;
    n_passes_ = n_passes;
    n_        = 0;
    sum_      = 0.0;
}

void thread_governor::measured(size_t n_seq, size_t n_tokens, int64_t us) {
    const auto   time  = static_cast<double>(us);
    double &     usual = usual_[kind(n_seq, n_tokens)];
    if (usual == 0.0) {
        if (!halved()) {
            usual = time;
        }
        return;  // nothing to compare it with
    }
    const double ratio = time - usual < slow_us ? std::min(1.0, time / usual) : time / usual;
    sum_ += ratio;
    ++n_;
    switch (state_) {
        case state::all:
            usual    = std::min(time, usual * drift);
            all_     = (1.0 - weight) * all_ + weight * ratio;
            all_cut_ = (1.0 - weight) * all_cut_ + weight * std::min(ratio, cut_ratio);
            if (all_cut_ > slow_ratio) {
                n_hold_ = n_hold_first;
                enter(state::trial, n_trial);
            }
            return;
        case state::trial:
            if (n_ == n_passes_) {
                half_ = sum_ / n_;
                if (half_ < much_better * all_) {
                    enter(state::halved, n_hold_);
                } else {  // it was not the threads: that long is usual now
                    usual_.clear();
                    all_ = all_cut_ = 1.0;
                    enter(state::all, 0);
                }
            }
            return;
        case state::halved:
            half_ = (1.0 - weight) * half_ + weight * ratio;
            if (n_ == n_passes_) {
                enter(state::probe, n_probe);
            }
            return;
        case state::probe:
            if (n_ == n_passes_) {
                if (sum_ / n_ < half_) {
                    all_ = all_cut_ = 1.0;
                    enter(state::all, 0);
                } else {
                    n_hold_ = std::min(2 * n_hold_, n_hold_max);
                    enter(state::halved, n_hold_);
                }
            }
            return;
    }
}

}  // namespace lfmfast
