#include "engine/prefix_tree.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/error.h"

namespace lfmfast {

struct prefix_tree::node {
    node *                                   parent = nullptr;
    std::map<int32_t, std::unique_ptr<node>> children;  // by the first token of their edge
    std::vector<int32_t>                     edge;
    std::vector<uint8_t>                     rows;  // of all tokens of the edge, or empty
    bytes_ptr                                checkpoint;
    logits_ptr                               logits;
    uint64_t                                 use    = 0;  // its key in by_use_
    size_t                                   n_pins = 0;

    bool is_point() const { return checkpoint || logits; }
    bool is_empty() const { return rows.empty() && !is_point(); }

    size_t bytes() const {
        constexpr size_t overhead = 200;  // about: this, its places in two maps, what the allocator adds
        return overhead + edge.size() * sizeof(int32_t) + rows.size() + (checkpoint ? checkpoint->size() : 0) +
               (logits ? logits->size() * sizeof(float) : 0);
    }

    node * child(int32_t token) const {
        const auto it = children.find(token);
        return it == children.end() ? nullptr : it->second.get();
    }

    // How many of these tokens its edge begins with.
    size_t common(const int32_t * tokens, size_t n) const {
        const auto end = edge.begin() + static_cast<std::ptrdiff_t>(std::min(n, edge.size()));
        return static_cast<size_t>(std::mismatch(edge.begin(), end, tokens).first - edge.begin());
    }
};

prefix_tree::prefix_tree(size_t max_bytes) : root_(std::make_unique<node>()), max_bytes_(max_bytes) {}

prefix_tree::~prefix_tree() {
    // The oldest is always a leaf. Left to the nodes, a long conversation would be as many nested calls.
    while (!by_use_.empty()) remove(by_use_.begin()->second);
}

void prefix_tree::set_row_size(size_t bytes) {
    if (bytes == row_size_) return;
    if (row_size_ != 0) {  // rows of another context: what else is here is of no use for it either
        while (!by_use_.empty()) remove(by_use_.begin()->second);
    }
    row_size_ = bytes;
}

template <typename visitor>
void prefix_tree::walk(const int32_t * tokens, size_t n, const visitor & visit) const {
    const node * at = root_.get();
    for (size_t first = 0; first < n;) {
        node * next = at->child(tokens[first]);
        if (!next) return;
        const size_t n_common = next->common(tokens + first, n - first);
        visit(next, first, n_common);
        if (n_common < next->edge.size()) return;
        first += n_common;
        at = next;
    }
}

prefix_match prefix_tree::match(const int32_t * tokens, size_t n) {
    prefix_match result;
    node *       last = root_.get();
    walk(tokens, n, [&](node * at, size_t first, size_t n_common) {
        last            = at;
        result.n_tokens = first + n_common;
        if (!at->rows.empty()) result.n_rows = result.n_tokens;  // no rows without those of the parent
        if (n_common == at->edge.size() && at->is_point()) {
            result.points.push_back({result.n_tokens, at->checkpoint, at->logits});
        }
    });
    touch(last);
    return result;
}

void prefix_tree::put_point(const int32_t * tokens, size_t n, bytes_ptr checkpoint, logits_ptr logits) {
    if (!checkpoint && !logits) return;
    node * at = root_.get();
    for (size_t first = 0; first < n;) {
        node * next = at->child(tokens[first]);
        if (!next) {
            at = add_leaf(at, tokens + first, n - first, nullptr);
            break;
        }
        const size_t n_common = next->common(tokens + first, n - first);
        if (n_common < next->edge.size()) next = split(next, n_common);
        first += n_common;
        at = next;
    }
    if (at == root_.get()) return;
    bytes_ -= at->bytes();
    if (!at->checkpoint) at->checkpoint = std::move(checkpoint);
    if (!at->logits) at->logits = std::move(logits);
    bytes_ += at->bytes();
    touch(at);
    remove_leaves(max_bytes_);
}

void prefix_tree::put_rows(const int32_t * tokens, size_t first, size_t n, const uint8_t * rows) {
    const size_t n_rows = match(tokens, n).n_rows;
    if (first > n || n_rows < first) {
        throw error(error_code::invalid_argument, "rows from token " + std::to_string(first) + " on, but the tree has " +
                    std::to_string(n_rows), static_cast<int64_t>(first), static_cast<int64_t>(n_rows));
    }
    if (n_rows == n) return;
    if (row_size_ == 0) throw error(error_code::invalid_argument, "rows before their size is known");

    node * at = root_.get();
    for (size_t begin = 0; begin < n;) {
        node *          next = at->child(tokens[begin]);
        const uint8_t * data = begin < n_rows ? nullptr : rows + (begin - first) * row_size_;
        if (!next) {
            at = add_leaf(at, tokens + begin, n - begin, data);
            break;
        }
        const size_t n_common = next->common(tokens + begin, n - begin);
        if (n_common < next->edge.size()) next = split(next, n_common);
        if (next->rows.empty()) {
            next->rows.assign(data, data + n_common * row_size_);
            bytes_ += next->rows.size();
        }
        begin += n_common;
        at = next;
    }
    touch(at);
    remove_leaves(max_bytes_);
}

std::vector<kv_rows> prefix_tree::rows(const int32_t * tokens, size_t n) const {
    std::vector<kv_rows> pieces;
    size_t               n_rows = 0;
    walk(tokens, n, [&](const node * at, size_t first, size_t n_common) {
        if (at->rows.empty()) return;
        pieces.push_back({at->rows.data(), n_common});
        n_rows = first + n_common;
    });
    if (n_rows < n) {
        throw error(error_code::invalid_argument, "rows of " + std::to_string(n) + " tokens, but the tree has " +
                    std::to_string(n_rows), static_cast<int64_t>(n), static_cast<int64_t>(n_rows));
    }
    return pieces;
}

bool prefix_tree::pin(const int32_t * tokens, size_t n) {
    node * at = find(tokens, n);
    if (!at) return false;
    ++at->n_pins;
    return true;
}

bool prefix_tree::unpin(const int32_t * tokens, size_t n) {
    node * at = find(tokens, n);
    if (!at || at->n_pins == 0) return false;
    --at->n_pins;
    remove_leaves(max_bytes_);
    return true;
}

void prefix_tree::clear() {
    const uint64_t n_evicted = n_evicted_;
    remove_leaves(0);
    n_evicted_ = n_evicted;
}

std::vector<std::vector<int32_t>> prefix_tree::paths() const {
    std::vector<std::vector<int32_t>> result;
    for (auto it = by_use_.rbegin(); it != by_use_.rend(); ++it) {
        const node * last = it->second;
        const bool   goes_on = std::any_of(last->children.begin(), last->children.end(),
                                           [](const auto & entry) { return !entry.second->rows.empty(); });
        if (last->rows.empty() || goes_on) continue;
        std::vector<const node *> nodes;
        for (const node * at = last; at != root_.get(); at = at->parent) nodes.push_back(at);
        std::vector<int32_t> path;
        for (auto at = nodes.rbegin(); at != nodes.rend(); ++at) {
            path.insert(path.end(), (*at)->edge.begin(), (*at)->edge.end());
        }
        result.push_back(std::move(path));
    }
    return result;
}

void prefix_tree::check() const {
    const auto expect = [](bool holds, const char * what) {
        if (!holds) throw error(error_code::internal, std::string("prefix tree: ") + what);
    };
    size_t n_nodes = 0;
    size_t n_bytes = 0;
    bool   removable = false;
    std::vector<const node *> todo = {root_.get()};
    while (!todo.empty()) {
        const node * at = todo.back();
        todo.pop_back();
        for (const auto & [token, child] : at->children) {
            expect(child->parent == at, "a parent that is not");
            expect(!child->edge.empty() && child->edge[0] == token, "a child in the wrong place");
            todo.push_back(child.get());
        }
        if (at == root_.get()) continue;
        ++n_nodes;
        n_bytes += at->bytes();
        const bool is_top = at->parent == root_.get();
        const auto it     = by_use_.find(at->use);
        expect(it != by_use_.end() && it->second == at, "a node without its last use");
        expect(at->use <= clock_, "a last use to come");
        expect(is_top || at->parent->use > at->use, "a parent older than its child");
        expect(at->rows.empty() || at->rows.size() == at->edge.size() * row_size_, "the size of the rows");
        expect(at->rows.empty() || is_top || !at->parent->rows.empty(), "rows after a gap");
        expect(!at->is_empty() || !at->children.empty(), "a leaf that holds nothing");
        expect(!at->is_empty() || at->n_pins == 0, "a pin on nothing");
        if (at->children.empty() && at->n_pins == 0) removable = true;
    }
    expect(root_->is_empty() && root_->edge.empty(), "a root that holds something");
    expect(n_nodes == n_nodes_ && n_nodes == by_use_.size(), "the number of nodes");
    expect(n_bytes == bytes_, "the number of bytes");
    expect(bytes_ <= max_bytes_ || !removable, "more than the limit");
}

prefix_tree::node * prefix_tree::find(const int32_t * tokens, size_t n) const {
    node * found = nullptr;
    walk(tokens, n, [&](node * at, size_t first, size_t n_common) {
        if (first + n_common == n && n_common == at->edge.size() && !at->is_empty()) found = at;
    });
    return found;
}

// Here and in split: all that can fail for want of memory comes first, and the tree is in order again at the end.

prefix_tree::node * prefix_tree::add_leaf(node * parent, const int32_t * tokens, size_t n, const uint8_t * rows) {
    auto leaf    = std::make_unique<node>();
    leaf->parent = parent;
    leaf->edge.assign(tokens, tokens + n);
    if (rows) leaf->rows.assign(rows, rows + n * row_size_);
    node *         added = leaf.get();
    const uint64_t use   = clock_ + 1;
    auto &         place = parent->children[tokens[0]];
    try {
        by_use_.emplace_hint(by_use_.end(), use, added);
    } catch (...) {
        parent->children.erase(tokens[0]);
        throw;
    }
    place      = std::move(leaf);
    added->use = use;
    clock_     = use;
    ++n_nodes_;
    bytes_ += added->bytes();
    touch(added);
    return added;
}

prefix_tree::node * prefix_tree::split(node * lower, size_t n) {
    auto       upper = std::make_unique<node>();
    const auto cut   = lower->edge.begin() + static_cast<std::ptrdiff_t>(n);
    upper->parent    = lower->parent;
    upper->edge.assign(lower->edge.begin(), cut);
    std::vector<int32_t> edge(cut, lower->edge.end());
    std::vector<uint8_t> rows;
    if (!lower->rows.empty()) {
        const auto row = lower->rows.begin() + static_cast<std::ptrdiff_t>(n * row_size_);
        upper->rows.assign(lower->rows.begin(), row);
        rows.assign(row, lower->rows.end());
    }
    node *         added = upper.get();
    const uint64_t use   = clock_ + 1;
    auto &         below = upper->children[edge[0]];
    by_use_.emplace_hint(by_use_.end(), use, added);

    auto & place = lower->parent->children.find(lower->edge[0])->second;
    bytes_ -= lower->bytes();
    lower->edge   = std::move(edge);
    lower->rows   = std::move(rows);
    lower->parent = added;
    below         = std::move(place);
    place         = std::move(upper);
    added->use    = use;
    clock_        = use;
    ++n_nodes_;
    bytes_ += lower->bytes() + added->bytes();
    touch(added);
    return added;
}

void prefix_tree::touch(node * last) {
    for (node * at = last; at != root_.get(); at = at->parent) {  // the parents later: never older than their children
        auto entry  = by_use_.extract(at->use);
        at->use     = ++clock_;
        entry.key() = at->use;
        by_use_.insert(by_use_.end(), std::move(entry));
    }
}

void prefix_tree::remove(node * leaf) {
    bytes_ -= leaf->bytes();
    --n_nodes_;
    by_use_.erase(leaf->use);
    const int32_t token = leaf->edge[0];  // not a reference into what goes
    leaf->parent->children.erase(token);
}

void prefix_tree::remove_with_empty_parents(node * leaf) {
    do {
        node * parent = leaf->parent;
        remove(leaf);
        leaf = parent;
    } while (leaf != root_.get() && leaf->children.empty() && leaf->is_empty());
}

void prefix_tree::remove_leaves(size_t max_bytes) {
    // Older than a node are its children, so those that are left when its turn comes are pinned, or above a pin.
    for (auto it = by_use_.begin(); bytes_ > max_bytes && it != by_use_.end();) {
        node * at = it->second;
        if (at->n_pins > 0 || !at->children.empty()) {
            ++it;
            continue;
        }
        const uint64_t use = at->use;
        remove_with_empty_parents(at);
        ++n_evicted_;
        it = by_use_.upper_bound(use);
    }
}

}  // namespace lfmfast
