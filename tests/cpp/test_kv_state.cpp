// States of a sequence: taken apart and put together without a byte lost, and refused rather than misread.
#include "check.h"
#include "engine/kv_state.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

using namespace lfmfast;
using bytes = std::vector<uint8_t>;

namespace {

template <typename T>
void put(bytes & out, T value) {
    uint8_t raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    out.insert(out.end(), raw, raw + sizeof(T));
}

template <typename T>
bytes with(bytes state, size_t at, T value) {
    std::memcpy(&state.at(at), &value, sizeof(T));
    return state;
}

bytes part_of(const bytes & b, size_t from, size_t to) {
    return bytes(b.begin() + static_cast<std::ptrdiff_t>(from), b.begin() + static_cast<std::ptrdiff_t>(to));
}

kv_part plain(int32_t type, uint64_t row_size) {
    kv_part part;
    part.type     = type;
    part.row_size = row_size;
    return part;
}

kv_part elements(int32_t type, uint32_t el_size, uint32_t n_embd) {
    kv_part part  = plain(type, uint64_t(el_size) * n_embd);
    part.el_size = el_size;
    part.n_embd  = n_embd;
    return part;
}

kv_layout make_layout(bool v_trans) {
    kv_layout layout;
    layout.n_layer = 3;
    layout.n_rot_k = 64;
    layout.n_rot_v = 128;
    layout.v_trans = v_trans;
    layout.keys    = {plain(1, 6), plain(8, 34), plain(0, 8)};
    if (v_trans) {
        layout.values = {elements(1, 2, 70), elements(0, 4, 3), elements(1, 2, 1)};  // 70: more than a tile
    } else {
        layout.values = {plain(1, 140), plain(0, 12), plain(1, 2)};
    }
    return layout;
}

bytes random_bytes(std::mt19937 & random, size_t n) {
    bytes b(n);
    for (uint8_t & x : b) x = static_cast<uint8_t>(random());
    return b;
}

// What the pinned llama.cpp writes, said once more in the plainest way.
struct sample {
    kv_layout            layout;
    bytes                rows;       // by position
    std::vector<int32_t> positions;  // of the cells
    uint32_t             n_stream = 1;
    uint32_t             stream   = 0;  // the one with the cells
    int32_t              seq_id   = 0;
    bytes                recurrent;

    uint8_t at(size_t cell, size_t offset) const { return rows.at(positions[cell] * layout.row_size() + offset); }

    bytes state() const {
        bytes out;
        put(out, 0xaf143cd8u);
        put(out, seq_id);
        put(out, n_stream);
        for (uint32_t s = 0; s < n_stream; ++s) {
            if (s != stream || positions.empty()) {
                put(out, 0u);
                continue;
            }
            put(out, static_cast<uint32_t>(positions.size()));
            for (const int32_t position : positions) {
                put(out, position);
                put(out, 1u);
                put(out, seq_id);
            }
            put(out, layout.v_trans ? 1u : 0u);
            put(out, layout.n_layer);
            put(out, layout.n_rot_k);
            put(out, layout.n_rot_v);
            size_t offset = 0;
            for (const auto * parts : {&layout.keys, &layout.values}) {
                for (const kv_part & part : *parts) {
                    put(out, part.type);
                    if (part.el_size == 0) {
                        put(out, part.row_size);
                        for (size_t c = 0; c < positions.size(); ++c) {
                            for (size_t i = 0; i < part.row_size; ++i) out.push_back(at(c, offset + i));
                        }
                    } else {
                        put(out, part.el_size);
                        put(out, part.n_embd);
                        for (size_t e = 0; e < part.n_embd; ++e) {
                            for (size_t c = 0; c < positions.size(); ++c) {
                                for (size_t i = 0; i < part.el_size; ++i) {
                                    out.push_back(at(c, offset + e * part.el_size + i));
                                }
                            }
                        }
                    }
                    offset += part.row_size;
                }
            }
        }
        out.insert(out.end(), recurrent.begin(), recurrent.end());
        return out;
    }
};

sample make_sample(std::mt19937 & random, size_t n, bool v_trans, uint32_t n_stream, bool hybrid) {
    sample s;
    s.layout = make_layout(v_trans);
    s.rows   = random_bytes(random, n * s.layout.row_size());
    s.positions.resize(n);
    std::iota(s.positions.begin(), s.positions.end(), 0);
    s.n_stream = n_stream;
    if (hybrid) s.recurrent = random_bytes(random, 57);
    return s;
}

void check_same(const kv_state & state, const sample & s, size_t first) {
    CHECK(state.layout == s.layout);
    CHECK_EQ(state.n_tokens, s.positions.size());
    CHECK(state.rows == part_of(s.rows, first * s.layout.row_size(), s.rows.size()));
    CHECK(state.recurrent == s.recurrent);
}

void states_come_apart_and_together() {
    std::mt19937 random(1);
    for (const bool v_trans : {false, true}) {
        for (const bool hybrid : {false, true}) {
            for (const uint32_t n_stream : {1u, 8u}) {
                for (const size_t n : {1, 2, 63, 64, 65, 150}) {
                    sample s = make_sample(random, n, v_trans, n_stream, hybrid);
                    const bytes partial = hybrid ? partial_state(s.recurrent) : bytes();
                    const bytes plain_state = s.state();
                    const size_t row = s.layout.row_size();

                    // In order and in the first stream: byte for byte what llama.cpp would have written.
                    CHECK(compose_kv_state(s.layout, n_stream, {{s.rows.data(), n}}, partial) == plain_state);
                    std::vector<kv_rows> pieces;
                    for (size_t at = 0; at < n;) {
                        const size_t size = std::min<size_t>(n - at, random() % 9);  // some of them empty
                        pieces.push_back({s.rows.data() + at * row, size});
                        at += size;
                    }
                    CHECK(compose_kv_state(s.layout, n_stream, pieces, partial) == plain_state);

                    std::shuffle(s.positions.begin(), s.positions.end(), random);
                    s.stream = n_stream - 1;
                    s.seq_id = static_cast<int32_t>(n_stream) - 1;
                    const bytes state = s.state();
                    for (const size_t first : {size_t(0), n / 2, n - 1, n}) {
                        check_same(parse_kv_state(state, n, first), s, first);
                    }
                    const kv_state parsed = parse_kv_state(state, n);
                    CHECK(compose_kv_state(parsed.layout, n_stream, {{parsed.rows.data(), n}}, partial) == plain_state);
                    CHECK_EQ(kv_n_stream(state), n_stream);
                }
            }
        }
    }
}

void an_empty_sequence_tells_the_streams() {
    std::mt19937 random(2);
    for (const uint32_t n_stream : {1u, 5u}) {
        const bytes state = make_sample(random, 0, false, n_stream, true).state();
        CHECK_EQ(kv_n_stream(state), n_stream);
        CHECK_THROWS(state, parse_kv_state(state, 0));
        CHECK_THROWS(state, parse_kv_state(state, 1));
    }
    CHECK_THROWS(state, kv_n_stream({}));
    CHECK_THROWS(state, kv_n_stream(bytes(11)));
    bytes state = make_sample(random, 0, false, 4, false).state();
    CHECK_EQ(kv_n_stream(state), 4u);
    CHECK_THROWS(state, kv_n_stream(with(state, 0, 1u)));
    CHECK_THROWS(state, kv_n_stream(with(state, 8, 0u)));
    CHECK_THROWS(state, kv_n_stream(with(state, 8, 5u)));
    CHECK_THROWS(state, kv_n_stream(with(state, 8, 0xffffffffu)));
}

void what_is_no_such_state_is_refused() {
    std::mt19937 random(3);
    const size_t n = 4;
    for (const bool v_trans : {false, true}) {
        sample s = make_sample(random, n, v_trans, 2, false);
        s.seq_id = 1;
        const bytes state = s.state();
        check_same(parse_kv_state(state, n), s, 0);

        CHECK_THROWS(state, parse_kv_state(state, n - 1));
        CHECK_THROWS(state, parse_kv_state(state, n + 1));
        CHECK_THROWS(state, parse_kv_state(state, n, n + 1));
        CHECK_THROWS(state, parse_kv_state(state, n + (uint64_t(1) << 32)));
        for (size_t end = 0; end < state.size(); ++end) CHECK_THROWS(state, parse_kv_state(part_of(state, 0, end), n));

        const size_t cells = 16;
        const size_t meta  = cells + 12 * n;
        const size_t key   = meta + 16;
        CHECK_THROWS(state, parse_kv_state(with(state, 0, 0xaf143cd9u), n));
        CHECK_THROWS(state, parse_kv_state(with(state, 4, 0), n));  // the cells are of another sequence
        CHECK_THROWS(state, parse_kv_state(with(state, 8, 0u), n));
        CHECK_THROWS(state, parse_kv_state(with(state, 12, 0xffffffffu), 0xffffffffu));
        CHECK_THROWS(state, parse_kv_state(with(state, cells, -1), n));
        CHECK_THROWS(state, parse_kv_state(with(state, cells, 1), n));  // twice
        CHECK_THROWS(state, parse_kv_state(with(state, cells, int32_t(n)), n));
        CHECK_THROWS(state, parse_kv_state(with(state, cells + 4, 2u), n));
        CHECK_THROWS(state, parse_kv_state(with(state, meta, 2u), n));
        CHECK_THROWS(state, parse_kv_state(with(state, meta, v_trans ? 0u : 1u), n));
        // Fewer layers than there are would read well, with a recurrent part in the end: the layout is another one then.
        for (const uint32_t n_layer : {0u, 4u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
            CHECK_THROWS(state, parse_kv_state(with(state, meta + 4, n_layer), n));
        }
        for (const uint64_t size : {uint64_t(0), uint64_t(5), uint64_t(1) << 62, ~uint64_t(0)}) {
            CHECK_THROWS(state, parse_kv_state(with(state, key + 4, size), n));
        }
        if (v_trans) {
            const size_t value = key + 3 * 12 + n * (6 + 34 + 8);
            for (const uint32_t size : {0u, 3u, 16u, 0xffffffffu}) {
                CHECK_THROWS(state, parse_kv_state(with(state, value + 4, size), n));
            }
            for (const uint32_t n_embd : {0u, 69u, 0x40000000u, 0xffffffffu}) {
                CHECK_THROWS(state, parse_kv_state(with(state, value + 8, n_embd), n));
            }
        }
    }

    // The second stream has cells, too.
    sample s = make_sample(random, 1, false, 1, false);
    bytes two = with(s.state(), 8, 2u);
    const bytes stream = part_of(two, 12, two.size());
    two.insert(two.end(), stream.begin(), stream.end());
    CHECK_THROWS(state, parse_kv_state(two, 1));

    // A cache whose cells have more fields.
    for (const int32_t token : {1, 7, 1000}) {
        bytes wide = s.state();
        for (const int32_t field : {0, 0, token}) {
            bytes raw;
            put(raw, field);
            wide.insert(wide.begin() + 24, raw.begin(), raw.end());
        }
        CHECK_THROWS(state, parse_kv_state(wide, 1));
    }
}

void nothing_is_composed_of_the_wrong_things() {
    std::mt19937 random(4);
    const sample s = make_sample(random, 2, true, 1, true);
    const bytes  partial = partial_state(s.recurrent);
    const std::vector<kv_rows> rows = {{s.rows.data(), 2}};
    CHECK_EQ(partial.size(), s.recurrent.size() + 8);
    CHECK_EQ(compose_kv_state(s.layout, 1, rows, partial).size(), s.state().size());
    CHECK_THROWS(state, compose_kv_state(s.layout, 1, {}, partial));
    CHECK_THROWS(state, compose_kv_state(s.layout, 1, {{s.rows.data(), 0}}, partial));
    CHECK_THROWS(state, compose_kv_state(s.layout, 0, rows, partial));
    CHECK_THROWS(state, compose_kv_state(s.layout, 1, rows, bytes(7)));
    CHECK_THROWS(state, compose_kv_state(s.layout, 1, rows, bytes(20)));
    CHECK_THROWS(state, compose_kv_state(s.layout, 1, {{s.rows.data(), size_t(1) << 40}}, partial));
    CHECK_THROWS(state, compose_kv_state(kv_layout(), 1, rows, partial));
    kv_layout layout = s.layout;
    layout.values.pop_back();
    CHECK_THROWS(state, compose_kv_state(layout, 1, rows, partial));
    layout         = s.layout;
    layout.v_trans = false;
    CHECK_THROWS(state, compose_kv_state(layout, 1, rows, partial));
}

void layouts_go_through_bytes() {
    for (const bool v_trans : {false, true}) {
        const kv_layout layout = make_layout(v_trans);
        const bytes     saved  = layout_to_bytes(layout);
        CHECK(layout_from_bytes(saved) == layout);
        for (size_t end = 0; end < saved.size(); ++end) CHECK_THROWS(state, layout_from_bytes(part_of(saved, 0, end)));
        bytes longer = saved;
        longer.push_back(0);
        CHECK_THROWS(state, layout_from_bytes(longer));
    }
    CHECK_EQ(make_layout(false).row_size(), make_layout(true).row_size());
    CHECK(make_layout(false) != make_layout(true));
}

// Damaged states are read within their bytes (the sanitizer watches) and are refused or hold together.
void damage_is_survived() {
    std::mt19937 random(5);
    size_t n_parsed = 0, n_refused = 0;
    for (int round = 0; round < 8000; ++round) {
        const size_t n     = 1 + random() % 6;
        const sample s     = make_sample(random, n, random() % 2, 1 + random() % 3, random() % 2);
        bytes        state = round % 8 == 7 ? layout_to_bytes(s.layout) : s.state();
        for (unsigned i = random() % 3; i < 3; ++i) {
            // Mostly near the beginning, where the fields are.
            const size_t at = random() % (random() % 4 ? std::min<size_t>(state.size(), 120) : state.size());
            switch (random() % 4) {
                case 0: state[at] ^= static_cast<uint8_t>(1u << random() % 8); break;
                case 1: state[at] = static_cast<uint8_t>(random()); break;
                case 2: state[at] = random() % 2 ? 0xff : 0; break;
                default: if (random() % 2) state = part_of(state, 0, at + 1);
            }
        }
        try {
            if (round % 8 == 7) {
                const kv_layout layout = layout_from_bytes(bytes(state));
                CHECK(layout_from_bytes(layout_to_bytes(layout)) == layout);
            } else {
                try {
                    CHECK(kv_n_stream(state) > 0);
                } catch (const error & e) {
                    CHECK(e.code == error_code::state);
                }
                const kv_state parsed = parse_kv_state(state, n);
                CHECK_EQ(parsed.rows.size(), n * parsed.layout.row_size());
                const bytes again = compose_kv_state(parsed.layout, 1, {{parsed.rows.data(), n}},
                                                     partial_state(parsed.recurrent));
                const kv_state same = parse_kv_state(again, n);
                CHECK(same.layout == parsed.layout && same.rows == parsed.rows && same.recurrent == parsed.recurrent);
            }
            ++n_parsed;
        } catch (const error & e) {
            CHECK(e.code == error_code::state);
            ++n_refused;
        }
    }
    CHECK(n_parsed > 500);
    CHECK(n_refused > 500);
}

}  // namespace

int main() {
    states_come_apart_and_together();
    an_empty_sequence_tells_the_streams();
    what_is_no_such_state_is_refused();
    nothing_is_composed_of_the_wrong_things();
    layouts_go_through_bytes();
    damage_is_survived();
    return check::failures != 0;
}
