// Whether to compute with all threads or with half of them. ggml's threads wait for each other by spinning, some hundred times
// in a pass: when another program takes one of their cores, each wait lasts until the scheduler gives the core back, and a
// pass on two busy cores was seen to take fifty times as long. Fewer threads then are faster. Pure policy, no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace lfmfast {

class thread_governor {
  public:
    bool halved() const { return state_ == state::trial || state_ == state::halved; }

    // How long a pass took with n_seq sequences and n_tokens tokens of each.
    void measured(size_t n_seq, size_t n_tokens, int64_t us);

  private:
    enum class state { all, trial, halved, probe };  // trial, probe: some passes the other way, to compare

    void enter(state next, int n_passes);

    state  state_ = state::all;
    std::map<size_t, double> usual_;  // microseconds of passes of one kind with all threads, at their best
    double all_     = 1.0;  // times the usual that passes take with all threads; a moving average
    double all_cut_ = 1.0;  // the same with single passes counted as cut_ratio at most
    double half_    = 1.0;  // with half of them
    double sum_     = 0.0;  // of the ratios since the state was entered
    int    n_       = 0;
    int    n_passes_ = 0;   // until the next decision
    int    n_hold_   = 0;
};

}  // namespace lfmfast
