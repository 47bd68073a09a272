// What the engine computes next, and where. Pure policy: numbers in, numbers out; no model, no clock.
//
// llama.cpp splits a batch so that every sequence has the same number of tokens in a pass, and only sequences with
// consecutive ids share one (llama_batch_allocr::split_equal). So each call is built to be one pass: a step (one token of
// each running sequence), or a chunk of one prompt, first come first served. Packing equal chunks of several short prompts
// into a pass was measured too, see bench/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lfmfast {

// A running sequence, as the scheduler sees it.
struct sequence_view {
    int32_t  id        = 0;
    size_t   n_pending = 1;      // tokens to read before it can be sampled: 1 while it generates
    size_t   n_to_cut  = SIZE_MAX;  // a pass must not go further than this many tokens
    uint64_t order     = 0;      // first come, first served
    bool     alone     = false;  // must have its passes to itself (after one that failed)
};

struct pass_item {
    int32_t id;
    size_t  n_tokens;
};

class scheduler {
  public:
    // `max_stall_us`: how long a pass may take that reads a prompt while other sequences generate.
    scheduler(size_t n_ubatch, int64_t max_stall_us) : n_ubatch_(n_ubatch), max_stall_us_(max_stall_us) {}

    // The next pass, ascending by id; empty when nothing runs. `running`: ascending by id.
    std::vector<pass_item> next(const std::vector<sequence_view> & running);
    // How long the pass that next() gave took.
    void measured(const std::vector<pass_item> & pass, int64_t us);

    // Tokens of a prompt that one pass may read; half as many more if that finishes it (but never more than a ubatch).
    size_t chunk_limit(bool others_generate) const;

  private:
    size_t  n_ubatch_;
    int64_t max_stall_us_;
    double  us_per_token_ = 0.0;   // of prompts; 0: not measured
    bool    prompt_last_  = false; // the last pass read a prompt
};

// Where a new sequence may go so that the running ones stay next to each other: the gaps among them, else the places at
// their ends, any place when nothing runs. `running`: ascending.
std::vector<int32_t> free_places(const std::vector<int32_t> & running, int32_t n_slots);

struct sequence_size {
    int32_t id;
    size_t  n_tokens;
};
struct sequence_move {
    int32_t from;
    int32_t to;
};
// The move that closes a gap among the running sequences (ascending by id), of the shorter one at the ends.
std::optional<sequence_move> closing_move(const std::vector<sequence_size> & running);

// Where to end passes while reading prompt[n_held .. n_prompt), ascending: at `branches` (places where other prompts are
// known to go on differently), at the last but one of `starts` (of messages: where the last question begins) if what it
// closes is worth a pass, and at other starts where the number of passes stays the same.
std::vector<size_t> choose_cuts(size_t n_held, size_t n_prompt, size_t n_ubatch, const std::vector<size_t> & starts,
                                const std::vector<size_t> & branches);

}  // namespace lfmfast
