// Which prefixes of past prompts and answers can be resumed: a radix tree over token ids. Pure policy: it holds bytes and
// decides what to keep; the engine reads and writes the context. Used by one thread.
//
// A node is the tokens from its parent on (its edge). It can own
//   rows        the attention memory of the tokens of its edge (kv_state.h), in host memory
//   checkpoint  the recurrent state after its last token, so that a hybrid model can go on there
//   logits      of its last token, so that a prompt that ends there needs no pass at all
// Each of them never changes once put; nodes are split, not changed. Over the limit, the least recently used leaf goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/kv_state.h"

namespace lfmfast {

using bytes_ptr  = std::shared_ptr<const std::vector<uint8_t>>;
using logits_ptr = std::shared_ptr<const std::vector<float>>;

// A place on the way of a prompt through the tree where something is kept.
struct prefix_point {
    size_t     n_tokens = 0;
    bytes_ptr  checkpoint;  // null: none
    logits_ptr logits;      // null: none
};

struct prefix_match {
    size_t                    n_tokens = 0;  // how far the prompt goes along the tree
    size_t                    n_rows   = 0;  // how far from the beginning rows are there without a gap (<= n_tokens)
    std::vector<prefix_point> points;        // ascending; those with a checkpoint or logits
};

class prefix_tree {
  public:
    // `row_size`: bytes of one token's rows (0 until known: set_row_size).
    explicit prefix_tree(size_t max_bytes);
    ~prefix_tree();
    prefix_tree(const prefix_tree &) = delete;
    prefix_tree & operator=(const prefix_tree &) = delete;

    void   set_row_size(size_t bytes);  // drops all rows if it is another one than before
    size_t row_size() const { return row_size_; }

    // Walks along the prompt; what it passes becomes the most recently used.
    prefix_match match(const int32_t * tokens, size_t n);

    // Remember a checkpoint and/or logits after tokens[0..n). What is there stays. n = 0 is ignored.
    void put_point(const int32_t * tokens, size_t n, bytes_ptr checkpoint, logits_ptr logits);

    // Rows of tokens[first..n), (n - first, row_size). Those that are there stay. Throws invalid_argument unless the rows
    // before `first` are there (match().n_rows >= first).
    void put_rows(const int32_t * tokens, size_t first, size_t n, const uint8_t * rows);

    // The rows of tokens[0..n) in pieces. Throws invalid_argument unless match().n_rows >= n. Valid until the next call
    // that is not const.
    std::vector<kv_rows> rows(const int32_t * tokens, size_t n) const;

    // A pinned prefix stays whatever the limit; pins are counted. pin: n must be a point (put_point) or end of rows; false if
    // the tree has no node that ends there. unpin: false if it is not pinned.
    bool pin(const int32_t * tokens, size_t n);
    bool unpin(const int32_t * tokens, size_t n);

    void clear();  // all but what is pinned

    size_t   bytes() const { return bytes_; }
    size_t   max_bytes() const { return max_bytes_; }
    size_t   n_nodes() const { return n_nodes_; }
    uint64_t n_evicted() const { return n_evicted_; }

    // Tokens of every longest path with rows, the most recently used first; for saving and for tests.
    std::vector<std::vector<int32_t>> paths() const;
    // Throws internal when something inside does not add up; for tests.
    void check() const;

  private:
    struct node;

    std::unique_ptr<node>      root_;
    std::map<uint64_t, node *> by_use_;  // every node but the root; a parent is never older than its children
    size_t   max_bytes_;
    size_t   row_size_  = 0;
    size_t   bytes_     = 0;
    size_t   n_nodes_   = 0;
    uint64_t clock_     = 0;
    uint64_t n_evicted_ = 0;

    // Calls visit(node, first, n) for every edge on the way: tokens[first..first + n) are the first n of its edge.
    template <typename visitor>
    void   walk(const int32_t * tokens, size_t n, const visitor & visit) const;
    node * find(const int32_t * tokens, size_t n) const;  // the node that ends there and holds something, or null
    node * add_leaf(node * parent, const int32_t * tokens, size_t n, const uint8_t * rows);
    node * split(node * lower, size_t n);  // the new node, with the first n tokens of the edge
    void   touch(node * last);             // it and all above it become the most recently used
    void   remove(node * leaf);
    void   remove_with_empty_parents(node * leaf);
    void   remove_leaves(size_t max_bytes);  // the oldest first, until no more than this is held
};

}  // namespace lfmfast
