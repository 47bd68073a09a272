// The prefix tree against a naive model of it, and what it promises one by one.
#include "check.h"
#include "engine/prefix_tree.h"

#include <algorithm>
#include <map>
#include <random>

using namespace lfmfast;
using tokens_t = std::vector<int32_t>;
using buffer   = std::vector<uint8_t>;

namespace {

bytes_ptr checkpoint_of(size_t n) { return std::make_shared<const buffer>(n); }
logits_ptr logits_of(size_t n) { return std::make_shared<const std::vector<float>>(n); }

tokens_t head(const tokens_t & tokens, size_t n) { return tokens_t(tokens.begin(), tokens.begin() + static_cast<long>(n)); }

size_t common(const tokens_t & a, const tokens_t & b) {
    size_t n = 0;
    while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
    return n;
}

// The row of the last token depends on all before it, as in a real cache.
buffer rows_of(const tokens_t & tokens, size_t first, size_t row_size) {
    buffer   rows;
    uint32_t hash = 1;
    for (size_t i = 0; i < tokens.size(); ++i) {
        hash = hash * 16777619u + static_cast<uint32_t>(tokens[i]) + 1u;
        for (size_t k = 0; i >= first && k < row_size; ++k) rows.push_back(static_cast<uint8_t>((hash >> (8 * (k % 4))) + k));
    }
    return rows;
}

buffer joined(const std::vector<kv_rows> & pieces, size_t row_size) {
    buffer rows;
    for (const kv_rows & piece : pieces) rows.insert(rows.end(), piece.data, piece.data + piece.n_tokens * row_size);
    return rows;
}

// Easier to call.
struct tree_t : prefix_tree {
    tree_t(size_t max_bytes, size_t row_size) : prefix_tree(max_bytes) { set_row_size(row_size); }
    prefix_match match(const tokens_t & t) { return prefix_tree::match(t.data(), t.size()); }
    void put(const tokens_t & t, size_t first = 0) {
        prefix_tree::put_rows(t.data(), first, t.size(), rows_of(t, first, row_size()).data());
    }
    void point(const tokens_t & t, bytes_ptr c, logits_ptr l = nullptr) { put_point(t.data(), t.size(), c, l); }
    buffer rows(const tokens_t & t) const { return joined(prefix_tree::rows(t.data(), t.size()), row_size()); }
    bool  pin(const tokens_t & t) { return prefix_tree::pin(t.data(), t.size()); }
    bool  unpin(const tokens_t & t) { return prefix_tree::unpin(t.data(), t.size()); }
    // Without a trace in the order of use.
    bool  has(const tokens_t & t) const {
        try {
            return prefix_tree::rows(t.data(), t.size()).size() > 0;
        } catch (const error &) {
            return false;
        }
    }
};

// A set of the prefixes at which nodes end; everything else is worked out anew each time.
struct model {
    struct entry {
        bool       rows = false;
        bytes_ptr  checkpoint;
        logits_ptr logits;
        uint64_t   use  = 0;
        int        pins = 0;
        bool       empty() const { return !rows && !checkpoint && !logits; }
    };
    using iterator = std::map<tokens_t, entry>::iterator;

    std::map<tokens_t, entry> nodes;
    size_t   max_bytes = 0, row_size = 0, overhead = 0;
    uint64_t clock = 0, n_evicted = 0;

    size_t parent_size(const tokens_t & key) const {
        for (size_t n = key.size() - 1; n > 0; --n) {
            if (nodes.count(head(key, n))) return n;
        }
        return 0;
    }
    bool is_leaf(const tokens_t & key) const {
        return std::none_of(nodes.begin(), nodes.end(), [&](const auto & other) {
            return other.first.size() > key.size() && common(other.first, key) == key.size();
        });
    }
    size_t bytes() const {
        size_t n = 0;
        for (const auto & [key, e] : nodes) {
            const size_t edge = key.size() - parent_size(key);
            n += overhead + edge * 4 + (e.rows ? edge * row_size : 0) + (e.checkpoint ? e.checkpoint->size() : 0) +
                 (e.logits ? e.logits->size() * 4 : 0);
        }
        return n;
    }
    size_t reach(const tokens_t & t) const {
        size_t n = 0;
        for (const auto & entry : nodes) n = std::max(n, common(entry.first, t));
        return n;
    }
    // The nodes on the way, the deepest first; that of an edge that is only begun, too.
    std::vector<iterator> way(const tokens_t & t) {
        const size_t n = reach(t);
        std::vector<iterator> found;
        for (auto it = nodes.begin(); it != nodes.end(); ++it) {
            const size_t m = common(it->first, t);
            if (m == it->first.size() || (m == n && m > parent_size(it->first))) found.push_back(it);
        }
        std::sort(found.begin(), found.end(), [](iterator a, iterator b) { return a->first.size() > b->first.size(); });
        return found;
    }
    void touch(const tokens_t & t) {
        for (iterator it : way(t)) it->second.use = ++clock;
    }
    prefix_match match(const tokens_t & t) {
        prefix_match m;
        m.n_tokens = reach(t);
        for (iterator it : way(t)) {
            const auto & [key, e] = *it;
            if (e.rows) m.n_rows = std::max(m.n_rows, std::min(key.size(), m.n_tokens));
            if (key.size() <= m.n_tokens && (e.checkpoint || e.logits)) {
                m.points.insert(m.points.begin(), {key.size(), e.checkpoint, e.logits});
            }
        }
        touch(t);
        return m;
    }
    void end_a_node(const tokens_t & key) {
        if (key.empty() || nodes.count(key)) return;
        entry e;
        for (const auto & [other, below] : nodes) {  // of a node that is split, both halves have rows
            const bool is_below = other.size() > key.size() && common(other, key) == key.size();
            if (is_below && parent_size(other) < key.size()) e.rows = below.rows;
        }
        nodes[key] = e;
    }
    void put_point(const tokens_t & t, bytes_ptr c, logits_ptr l) {
        end_a_node(head(t, reach(t)));
        end_a_node(t);
        if (!nodes[t].checkpoint) nodes[t].checkpoint = c;
        if (!nodes[t].logits) nodes[t].logits = l;
        touch(t);
        evict(max_bytes, true);
    }
    void put_rows(const tokens_t & t) {
        if (match(t).n_rows < t.size()) {
            end_a_node(head(t, reach(t)));
            end_a_node(t);
            for (iterator it : way(t)) it->second.rows = true;
        }
        touch(t);
        evict(max_bytes, true);
    }
    void evict(size_t limit, bool counts) {
        while (bytes() > limit) {
            iterator oldest = nodes.end();
            for (auto it = nodes.begin(); it != nodes.end(); ++it) {
                if (it->second.pins || !is_leaf(it->first)) continue;
                if (oldest == nodes.end() || it->second.use < oldest->second.use) oldest = it;
            }
            if (oldest == nodes.end()) return;
            n_evicted += counts;
            tokens_t key = oldest->first;
            do {
                const tokens_t above = head(key, parent_size(key));
                nodes.erase(key);
                key = above;
            } while (!key.empty() && nodes[key].empty() && is_leaf(key));
        }
    }
    std::vector<tokens_t> paths() const {
        std::map<uint64_t, tokens_t> by_use;
        for (const auto & [key, e] : nodes) {
            bool longest = e.rows;
            for (const auto & [other, o] : nodes) {
                if (other.size() > key.size() && common(other, key) == key.size() && o.rows) longest = false;
            }
            if (longest) by_use[~e.use] = key;
        }
        std::vector<tokens_t> result;
        for (const auto & entry : by_use) result.push_back(entry.second);
        return result;
    }
};

size_t node_overhead() {
    tree_t tree(100000, 8);
    tree.put({1, 2, 3});
    return tree.bytes() - 3 * (4 + 8);
}

void same_match(const prefix_match & a, const prefix_match & b) {
    CHECK_EQ(a.n_tokens, b.n_tokens);
    CHECK_EQ(a.n_rows, b.n_rows);
    CHECK_EQ(a.points.size(), b.points.size());
    for (size_t i = 0; i < std::min(a.points.size(), b.points.size()); ++i) {
        CHECK_EQ(a.points[i].n_tokens, b.points[i].n_tokens);
        CHECK(a.points[i].checkpoint == b.points[i].checkpoint);
        CHECK(a.points[i].logits == b.points[i].logits);
    }
}

void as_the_model(unsigned seed, size_t max_bytes) {
    std::mt19937 random(seed);
    size_t row_size = 5;
    tree_t tree(max_bytes, row_size);
    model  m;
    m.max_bytes = max_bytes;
    m.row_size  = row_size;
    m.overhead  = node_overhead();
    std::vector<tokens_t> pinned;
    size_t n_pins = 0, n_gaps = 0;
    for (int round = 0; round < 2500 && check::failures == 0; ++round) {
        tokens_t t(1 + random() % 10);
        for (int32_t & token : t) token = static_cast<int32_t>(random() % 8 ? 0 : random() % 3);
        switch (random() % 16) {
            case 0: case 1: case 2: case 3: case 4: {
                const auto c = random() % 3 ? checkpoint_of(random() % 90) : nullptr;
                const auto l = random() % 3 ? nullptr : logits_of(random() % 30);
                tree.point(t, c, l);
                if (c || l) m.put_point(t, c, l);
                break;
            }
            case 5: case 6: case 7: case 8: case 9: {
                const size_t n_rows = m.match(t).n_rows;
                const size_t first  = n_rows ? random() % (n_rows + 1) : 0;
                if (n_rows < t.size()) {
                    CHECK_THROWS(invalid_argument, tree.put(t, n_rows + 1));
                    ++n_gaps;
                }
                tree.put(t, first);
                m.put_rows(t);
                break;
            }
            case 10: {
                const auto it = m.nodes.find(t);
                const bool ok = it != m.nodes.end() && !it->second.empty();
                CHECK_EQ(tree.pin(t), ok);
                if (ok) {
                    ++it->second.pins;
                    ++n_pins;
                    pinned.push_back(t);
                }
                break;
            }
            case 11: case 12:
                if (!pinned.empty() && random() % 4) t = pinned[random() % pinned.size()];
                if (std::find(pinned.begin(), pinned.end(), t) == pinned.end()) {
                    CHECK(!tree.unpin(t));
                } else {
                    pinned.erase(std::find(pinned.begin(), pinned.end(), t));
                    CHECK(tree.unpin(t));
                    --m.nodes.at(t).pins;
                    m.evict(max_bytes, true);
                }
                break;
            case 13:
                if (random() % 40 == 0) {
                    tree.clear();
                    m.evict(0, false);
                } else if (random() % 80 == 0) {
                    row_size = 1 + random() % 9;
                    if (row_size != m.row_size) {
                        m.nodes.clear();
                        pinned.clear();
                    }
                    tree.set_row_size(row_size);
                    m.row_size = row_size;
                }
                break;
            default: same_match(tree.match(t), m.match(t));
        }
        tree.check();
        CHECK_EQ(tree.bytes(), m.bytes());
        CHECK_EQ(tree.n_nodes(), m.nodes.size());
        CHECK_EQ(tree.n_evicted(), m.n_evicted);
        CHECK(tree.paths() == m.paths());
        for (const auto & [key, e] : m.nodes) {
            CHECK_EQ(tree.has(key), e.rows);
            if (e.rows) CHECK(tree.rows(key) == rows_of(key, 0, row_size));
        }
    }
    CHECK_EQ(tree.n_evicted() > 100, max_bytes < 100000);
    CHECK(n_pins > 20);
    CHECK(n_gaps > 50);
}

void edges_are_split() {
    tree_t tree(100000, 4);
    const tokens_t a = {1, 2, 3, 4, 5, 6}, b = {1, 2, 3, 9, 9};
    const auto c = checkpoint_of(10);
    tree.put(a);
    tree.point(a, c);
    CHECK_EQ(tree.n_nodes(), 1u);
    prefix_match m = tree.match(b);
    CHECK_EQ(m.n_tokens, 3u);  // inside an edge
    CHECK_EQ(m.n_rows, 3u);
    CHECK(m.points.empty());
    CHECK_EQ(tree.n_nodes(), 1u);
    tree.put(b, 3);
    CHECK_EQ(tree.n_nodes(), 3u);
    CHECK_EQ(tree.match(b).n_rows, 5u);
    CHECK(tree.match(b).points.empty());  // the point stays where it was
    m = tree.match({1, 2, 3, 4, 5, 6, 7});
    CHECK_EQ(m.n_tokens, 6u);
    CHECK_EQ(m.points.size(), 1u);
    CHECK_EQ(m.points.at(0).n_tokens, 6u);
    CHECK(m.points.at(0).checkpoint == c);

    // The last piece may end inside an edge.
    const auto pieces = static_cast<prefix_tree &>(tree).rows(a.data(), 5);
    CHECK_EQ(pieces.size(), 2u);
    CHECK_EQ(pieces.at(0).n_tokens, 3u);
    CHECK_EQ(pieces.at(1).n_tokens, 2u);
    CHECK(joined(pieces, 4) == rows_of(head(a, 5), 0, 4));
    CHECK(tree.rows({}).empty());
    CHECK_THROWS(invalid_argument, tree.rows({1, 2, 3, 4, 4}));
    CHECK_THROWS(invalid_argument, tree.rows({2}));
    CHECK((tree.paths() == std::vector<tokens_t>{a, b}));
}

void only_missing_rows_are_put() {
    tree_t tree(100000, 4);
    const auto c = checkpoint_of(1);
    tree.point({1, 2}, c);
    tree.point({1, 2, 3, 4, 5}, nullptr, logits_of(2));
    CHECK_EQ(tree.match({1, 2, 3}).n_tokens, 3u);
    CHECK_EQ(tree.match({1, 2, 3}).n_rows, 0u);
    CHECK(tree.paths().empty());
    tree.put({1, 2});
    const kv_rows before = static_cast<prefix_tree &>(tree).rows(tokens_t{1}.data(), 1).at(0);
    tree.put({1, 2, 3});  // ends inside the edge 3, 4, 5, of which the rest has none
    CHECK_EQ(tree.match({1, 2, 3, 4, 5}).n_rows, 3u);
    CHECK_EQ(tree.match({1, 2, 3, 4, 5}).n_tokens, 5u);
    CHECK_EQ(tree.match({1, 2, 3, 4, 5}).points.size(), 2u);
    CHECK((tree.paths() == std::vector<tokens_t>{{1, 2, 3}}));
    tree.put({1, 2, 3, 4, 5, 6}, 1);
    CHECK(tree.rows({1, 2, 3, 4, 5, 6}) == rows_of({1, 2, 3, 4, 5, 6}, 0, 4));
    CHECK(before.data == static_cast<prefix_tree &>(tree).rows(tokens_t{1}.data(), 1).at(0).data);

    // What is there stays; what is missing at a point comes in addition.
    tree.point({1, 2}, checkpoint_of(7), logits_of(3));
    CHECK(tree.match({1, 2}).points.at(0).checkpoint == c);
    CHECK_EQ(tree.match({1, 2}).points.at(0).logits->size(), 3u);

    const size_t n_nodes = tree.n_nodes();
    tree.point({}, checkpoint_of(7));
    tree.point({8}, nullptr);
    CHECK_EQ(tree.n_nodes(), n_nodes);
    CHECK_THROWS(invalid_argument, tree.put_rows(tokens_t{1, 2}.data(), 3, 2, nullptr));
    CHECK_THROWS(invalid_argument, tree_t(1000, 0).put({1}));
    tree.check();
}

void the_oldest_leaf_goes() {
    const size_t node = node_overhead() + 4 + 100;  // of one token with its rows
    tree_t tree(4 * node, 100);
    tree.put({1});
    tree.put({2});
    tree.put({3});
    tree.put({1, 5}, 1);
    CHECK_EQ(tree.bytes(), tree.max_bytes());
    CHECK_EQ(tree.n_evicted(), 0u);
    tree.match({2});
    tree.put({4});
    CHECK(!tree.has({3}));
    tree.put({6});  // 1 was used with 1, 5: the leaf goes first
    CHECK(!tree.has({1, 5}));
    CHECK(tree.has({1}) && tree.has({2}) && tree.has({4}) && tree.has({6}));
    tree.match({1, 7});
    tree.put({8});
    CHECK(!tree.has({2}) && tree.has({1}));
    CHECK_EQ(tree.n_evicted(), 3u);
    CHECK((tree.paths() == std::vector<tokens_t>{{8}, {1}, {6}, {4}}));

    tree.put({9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9});  // alone too large: all for nothing
    CHECK_EQ(tree.match({9}).n_tokens, 0u);
    CHECK_EQ(tree.n_nodes(), 0u);
    CHECK_EQ(tree.bytes(), 0u);

    // A node that only parts two others goes with the last of them.
    tree.point({1, 1}, checkpoint_of(1));
    tree.point({1, 2}, checkpoint_of(1));
    CHECK_EQ(tree.n_nodes(), 3u);
    tree.point({3}, checkpoint_of(tree.max_bytes() - node_overhead() - 4));
    CHECK_EQ(tree.n_nodes(), 1u);
    tree.check();
}

void pins_hold() {
    const size_t node = node_overhead() + 4 + 100;
    tree_t tree(3 * node, 100);
    tree.put({1, 2});
    CHECK(!tree.pin({1}));
    CHECK(!tree.pin({}));
    CHECK(!tree.pin({1, 2, 3}));
    CHECK(tree.pin({1, 2}));
    CHECK(tree.pin({1, 2}));
    tree.put({1, 3}, 1);  // the pin stays at the end of its edge
    CHECK(!tree.unpin({1}));
    tree.put({4});
    tree.put({5});
    CHECK(tree.has({1, 2}) && !tree.has({1, 3}) && !tree.has({4}) && tree.has({5}));
    CHECK(tree.unpin({1, 2}));
    tree.put({6});
    CHECK(tree.has({1, 2}));
    tree.clear();
    CHECK(tree.has({1, 2}) && !tree.has({6}));
    CHECK_EQ(tree.n_nodes(), 2u);
    CHECK(tree.unpin({1, 2}));
    CHECK(!tree.unpin({1, 2}));
    CHECK(tree.has({1, 2}));  // within the limit
    tree.clear();
    CHECK_EQ(tree.n_nodes(), 0u);

    // Pinned over the limit; it goes when the pin does. A node that only parts others is not worth a pin.
    tree_t small(3 * node_overhead() + 100, 4);
    small.point({1, 1}, checkpoint_of(20));
    small.point({1, 2}, checkpoint_of(20));
    CHECK(!small.pin({1}));
    CHECK(small.pin({1, 1}) && small.pin({1, 2}));
    small.point({1, 2, 3}, checkpoint_of(20));
    CHECK_EQ(small.n_nodes(), 3u);
    CHECK_EQ(small.match({1, 2, 3}).n_tokens, 2u);
    small.point({1, 1}, nullptr, logits_of(20));
    CHECK(small.bytes() > small.max_bytes());
    CHECK(small.unpin({1, 2}));
    CHECK_EQ(small.match({1, 2}).n_tokens, 1u);
    CHECK(small.bytes() <= small.max_bytes());
    small.check();
}

void other_rows_drop_all() {
    tree_t tree(100000, 0);
    tree.point({1, 2}, checkpoint_of(5));
    tree.set_row_size(8);
    CHECK_EQ(tree.match({1, 2}).points.size(), 1u);  // there were no rows before
    tree.put({1, 2});
    CHECK(tree.pin({1, 2}));
    tree.set_row_size(8);
    CHECK(tree.has({1, 2}));
    tree.set_row_size(4);
    CHECK_EQ(tree.n_nodes(), 0u);
    CHECK_EQ(tree.bytes(), 0u);
    CHECK(!tree.unpin({1, 2}));
    tree.put({1, 2});
    CHECK(tree.rows({1, 2}) == rows_of({1, 2}, 0, 4));
    tree.check();
}

}  // namespace

int main() {
    edges_are_split();
    only_missing_rows_are_put();
    the_oldest_leaf_goes();
    pins_hold();
    other_rows_drop_all();
    as_the_model(1, 3000);
    as_the_model(2, 1200);
    as_the_model(3, 1000000);
    return check::failures != 0;
}
