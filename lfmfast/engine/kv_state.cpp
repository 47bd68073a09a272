#include "engine/kv_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "engine/error.h"

namespace lfmfast {

namespace {

constexpr uint32_t state_magic   = 0xaf143cd8;  // llama_context::state_seq_get_data
constexpr uint32_t layout_magic  = 0x316b6c66;  // "flk1"
constexpr size_t   cell_bytes    = 12;          // position, number of sequences, sequence
constexpr uint32_t max_layers    = 4096;        // limits far above any model, so that no sum below can overflow
constexpr uint32_t max_streams   = 4096;
constexpr uint64_t max_row_size  = uint64_t(1) << 26;
constexpr size_t   transpose_dim = 64;          // a tile of 8 byte elements fits the first level cache

[[noreturn]] void refuse(const std::string & why) {
    throw error(error_code::state, "cannot use the saved state: " + why);
}

class reader {
  public:
    explicit reader(const std::vector<uint8_t> & bytes) : at_(bytes.data()), left_(bytes.size()) {}

    template <typename T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof(T)), sizeof(T));
        return value;
    }

    const uint8_t * take(uint64_t n) {
        if (n > left_) refuse("it ends too early");
        const uint8_t * p = at_;
        at_ += n;
        left_ -= static_cast<size_t>(n);
        return p;
    }

    // count * size bytes; neither needs to be sane
    const uint8_t * take(uint64_t count, uint64_t size) {
        if (size != 0 && count > left_ / size) refuse("it ends too early");
        return take(count * size);
    }

    const uint8_t * at() const { return at_; }
    size_t          left() const { return left_; }

  private:
    const uint8_t * at_;
    size_t          left_;
};

class writer {
  public:
    explicit writer(std::vector<uint8_t> & out) : out_(out) {}

    template <typename T>
    void put(T value) {
        const auto * p = reinterpret_cast<const uint8_t *>(&value);
        out_.insert(out_.end(), p, p + sizeof(T));
    }

    void put(const uint8_t * p, size_t n) {
        if (n) out_.insert(out_.end(), p, p + n);
    }

  private:
    std::vector<uint8_t> & out_;
};

void check_part(const kv_part & part, bool transposed) {
    if (part.row_size == 0 || part.row_size > max_row_size) refuse("row size " + std::to_string(part.row_size));
    if (!transposed) {
        if (part.el_size != 0 || part.n_embd != 0) refuse("elements of a part that is not transposed");
        return;
    }
    if (part.el_size != 1 && part.el_size != 2 && part.el_size != 4 && part.el_size != 8) {
        refuse("element size " + std::to_string(part.el_size));
    }
    if (part.row_size != uint64_t(part.el_size) * part.n_embd) refuse("row size " + std::to_string(part.row_size));
}

void check_n_layer(uint32_t n_layer) {
    if (n_layer == 0 || n_layer > max_layers) refuse(std::to_string(n_layer) + " layers");
}

void check_n_stream(uint32_t n_stream) {
    if (n_stream == 0 || n_stream > max_streams) refuse(std::to_string(n_stream) + " streams");
}

void check_layout(const kv_layout & layout) {
    check_n_layer(layout.n_layer);
    if (layout.keys.size() != layout.n_layer || layout.values.size() != layout.n_layer) {
        refuse("keys or values of a layer are missing");
    }
    for (const kv_part & part : layout.keys) check_part(part, false);
    for (const kv_part & part : layout.values) check_part(part, layout.v_trans);
}

// The sequence that the state was taken from.
int32_t read_header(reader & in) {
    if (in.get<uint32_t>() != state_magic) refuse("wrong magic");
    return in.get<int32_t>();
}

void write_header(writer & out) {
    out.put(state_magic);
    out.put(int32_t(0));
}

// out(c)[r] = in(r, c) for elements of E bytes. By tiles: rows of a power of two bytes apart would evict each other otherwise.
template <size_t E, typename In, typename Out>
void transpose_elements(size_t n_r, size_t n_c, const In & in, const Out & out) {
    uint8_t tile[transpose_dim * transpose_dim * E];
    for (size_t c0 = 0; c0 < n_c; c0 += transpose_dim) {
        const size_t nc = std::min(transpose_dim, n_c - c0);
        for (size_t r0 = 0; r0 < n_r; r0 += transpose_dim) {
            const size_t nr = std::min(transpose_dim, n_r - r0);
            for (size_t r = 0; r < nr; ++r) {
                for (size_t c = 0; c < nc; ++c) {
                    std::memcpy(tile + (c * transpose_dim + r) * E, in(r0 + r, c0 + c), E);
                }
            }
            for (size_t c = 0; c < nc; ++c) std::memcpy(out(c0 + c) + r0 * E, tile + c * transpose_dim * E, nr * E);
        }
    }
}

template <typename In, typename Out>
void transpose(size_t el_size, size_t n_r, size_t n_c, const In & in, const Out & out) {
    switch (el_size) {
        case 1: transpose_elements<1>(n_r, n_c, in, out); break;
        case 2: transpose_elements<2>(n_r, n_c, in, out); break;
        case 4: transpose_elements<4>(n_r, n_c, in, out); break;
        case 8: transpose_elements<8>(n_r, n_c, in, out); break;
        default: throw error(error_code::internal, "element size " + std::to_string(el_size));
    }
}

// The cell of each position.
std::vector<uint32_t> read_cells(reader & in, uint32_t n, int32_t seq_id) {
    const uint8_t * p = in.take(n, cell_bytes);
    constexpr uint32_t none = std::numeric_limits<uint32_t>::max();
    std::vector<uint32_t> cells(n, none);
    for (uint32_t i = 0; i < n; ++i, p += cell_bytes) {
        int32_t  pos;
        uint32_t n_seq_id;
        int32_t  seq;
        std::memcpy(&pos, p, 4);
        std::memcpy(&n_seq_id, p + 4, 4);
        std::memcpy(&seq, p + 8, 4);
        if (n_seq_id != 1 || seq != seq_id) refuse("a cell of another sequence");
        if (pos < 0 || static_cast<uint32_t>(pos) >= n || cells[pos] != none) {
            refuse("position " + std::to_string(pos) + " of " + std::to_string(n));
        }
        cells[pos] = i;
    }
    return cells;
}

// Keys and values of all cells of a stream, as they lie in the state.
struct stream_data {
    std::vector<uint32_t>        cells;  // by position
    std::vector<const uint8_t *> parts;  // keys of every layer, then values
};

stream_data read_stream(reader & in, kv_layout & layout, uint32_t n, int32_t seq_id) {
    stream_data data;
    data.cells = read_cells(in, n, seq_id);

    const auto v_trans = in.get<uint32_t>();
    if (v_trans > 1) refuse("not an attention cache that is known");
    layout.v_trans = v_trans == 1;
    layout.n_layer = in.get<uint32_t>();
    layout.n_rot_k = in.get<uint32_t>();
    layout.n_rot_v = in.get<uint32_t>();
    check_n_layer(layout.n_layer);
    for (uint32_t i = 0; i < 2 * layout.n_layer; ++i) {
        const bool is_value   = i >= layout.n_layer;
        const bool transposed = is_value && layout.v_trans;
        kv_part part;
        part.type = in.get<int32_t>();
        if (transposed) {
            part.el_size  = in.get<uint32_t>();
            part.n_embd   = in.get<uint32_t>();
            part.row_size = uint64_t(part.el_size) * part.n_embd;
        } else {
            part.row_size = in.get<uint64_t>();
        }
        check_part(part, transposed);
        data.parts.push_back(in.take(n, part.row_size));
        (is_value ? layout.values : layout.keys).push_back(part);
    }
    return data;
}

void copy_rows(const kv_layout & layout, const stream_data & data, size_t first, std::vector<uint8_t> & rows) {
    const size_t n      = data.cells.size() - first;
    const size_t stride = layout.row_size();
    rows.resize(n * stride);
    uint8_t * at = rows.data();
    for (size_t i = 0; i < data.parts.size(); ++i) {
        const kv_part & part = i < layout.n_layer ? layout.keys[i] : layout.values[i - layout.n_layer];
        const auto      size = static_cast<size_t>(part.row_size);
        const uint8_t * src  = data.parts[i];
        const uint32_t * cells = data.cells.data() + first;
        if (part.el_size == 0) {
            for (size_t t = 0; t < n; ++t) std::memcpy(at + t * stride, src + cells[t] * size, size);
        } else {
            const size_t el    = part.el_size;
            const size_t n_all = data.cells.size();
            transpose(el, part.n_embd, n, [=](size_t r, size_t c) { return src + (r * n_all + cells[c]) * el; },
                      [=](size_t c) { return at + c * stride; });
        }
        at += size;
    }
}

}  // namespace

size_t kv_layout::row_size() const {
    size_t n = 0;
    for (const kv_part & part : keys) n += static_cast<size_t>(part.row_size);
    for (const kv_part & part : values) n += static_cast<size_t>(part.row_size);
    return n;
}

bool kv_layout::operator==(const kv_layout & o) const {
    return n_layer == o.n_layer && n_rot_k == o.n_rot_k && n_rot_v == o.n_rot_v && v_trans == o.v_trans &&
           keys == o.keys && values == o.values;
}

kv_state parse_kv_state(const std::vector<uint8_t> & state, size_t n_tokens, size_t first_token) {
    reader     in(state);
    const auto seq_id   = read_header(in);
    const auto n_stream = in.get<uint32_t>();
    check_n_stream(n_stream);

    kv_state    result;
    stream_data data;
    for (uint32_t s = 0; s < n_stream; ++s) {
        const auto n_cells = in.get<uint32_t>();
        if (n_cells == 0) continue;
        if (!data.cells.empty()) refuse("one sequence in several streams");
        if (n_cells != n_tokens) {
            refuse(std::to_string(n_cells) + " tokens, not " + std::to_string(n_tokens));
        }
        data = read_stream(in, result.layout, n_cells, seq_id);
    }
    if (data.cells.empty()) refuse("it has no tokens");
    if (first_token > n_tokens) refuse("it has no token " + std::to_string(first_token));
    copy_rows(result.layout, data, first_token, result.rows);
    result.recurrent.assign(in.at(), in.at() + in.left());
    result.n_tokens = n_tokens;
    return result;
}

uint32_t kv_n_stream(const std::vector<uint8_t> & state) {
    reader in(state);
    read_header(in);
    const auto n_stream = in.get<uint32_t>();
    check_n_stream(n_stream);
    in.take(n_stream, sizeof(uint32_t));  // at least a number of cells each
    return n_stream;
}

std::vector<uint8_t> compose_kv_state(const kv_layout & layout, uint32_t n_stream, const std::vector<kv_rows> & rows,
                                      const std::vector<uint8_t> & partial) {
    check_layout(layout);
    check_n_stream(n_stream);
    reader recurrent(partial);
    if (!partial.empty()) read_header(recurrent);

    const size_t stride = layout.row_size();
    uint64_t     n      = 0;
    for (const kv_rows & piece : rows) {
        n += piece.n_tokens;
        if (piece.n_tokens > INT32_MAX || n > INT32_MAX || n > std::numeric_limits<size_t>::max() / 4 / stride) {
            refuse("too many tokens");
        }
    }
    if (n == 0) refuse("it has no tokens");
    std::vector<const uint8_t *> tokens;
    tokens.reserve(n);
    for (const kv_rows & piece : rows) {
        for (size_t t = 0; t < piece.n_tokens; ++t) tokens.push_back(piece.data + t * stride);
    }

    std::vector<uint8_t> state;
    state.reserve(n * (stride + cell_bytes) + 4 * size_t(n_stream) + 32 * size_t(layout.n_layer) + 64 + recurrent.left());
    writer out(state);
    write_header(out);
    out.put(n_stream);
    out.put(static_cast<uint32_t>(n));
    for (size_t t = 0; t < n; ++t) {
        out.put(static_cast<int32_t>(t));
        out.put(uint32_t(1));
        out.put(int32_t(0));
    }
    out.put(uint32_t(layout.v_trans));
    out.put(layout.n_layer);
    out.put(layout.n_rot_k);
    out.put(layout.n_rot_v);
    size_t offset = 0;
    for (size_t i = 0; i < 2 * size_t(layout.n_layer); ++i) {
        const kv_part & part = i < layout.n_layer ? layout.keys[i] : layout.values[i - layout.n_layer];
        const auto      size = static_cast<size_t>(part.row_size);
        out.put(part.type);
        if (part.el_size == 0) {
            out.put(part.row_size);
            for (const uint8_t * row : tokens) out.put(row + offset, size);
        } else {
            out.put(part.el_size);
            out.put(part.n_embd);
            const size_t    el   = part.el_size;
            const size_t    from = state.size();
            const uint8_t * const * row = tokens.data();
            state.resize(from + n * size);
            uint8_t * dst = state.data() + from;
            transpose(el, n, part.n_embd, [=](size_t r, size_t c) { return row[r] + offset + c * el; },
                      [=](size_t c) { return dst + c * n * el; });
        }
        offset += size;
    }
    for (uint32_t s = 1; s < n_stream; ++s) out.put(uint32_t(0));
    out.put(recurrent.at(), recurrent.left());
    return state;
}

std::vector<uint8_t> partial_state(const std::vector<uint8_t> & recurrent) {
    std::vector<uint8_t> state;
    state.reserve(recurrent.size() + 8);
    writer out(state);
    write_header(out);
    out.put(recurrent.data(), recurrent.size());
    return state;
}

std::vector<uint8_t> layout_to_bytes(const kv_layout & layout) {
    std::vector<uint8_t> bytes;
    writer out(bytes);
    out.put(layout_magic);
    out.put(layout.n_layer);
    out.put(layout.n_rot_k);
    out.put(layout.n_rot_v);
    out.put(uint32_t(layout.v_trans));
    for (const auto * parts : {&layout.keys, &layout.values}) {
        for (const kv_part & part : *parts) {
            out.put(part.type);
            out.put(part.row_size);
            out.put(part.el_size);
            out.put(part.n_embd);
        }
    }
    return bytes;
}

kv_layout layout_from_bytes(const std::vector<uint8_t> & bytes) {
    reader in(bytes);
    if (in.get<uint32_t>() != layout_magic) refuse("wrong magic of the layout");
    kv_layout layout;
    layout.n_layer = in.get<uint32_t>();
    layout.n_rot_k = in.get<uint32_t>();
    layout.n_rot_v = in.get<uint32_t>();
    const auto v_trans = in.get<uint32_t>();
    if (v_trans > 1) refuse("not a layout that is known");
    layout.v_trans = v_trans == 1;
    check_n_layer(layout.n_layer);
    for (auto * parts : {&layout.keys, &layout.values}) {
        for (uint32_t i = 0; i < layout.n_layer; ++i) {
            kv_part part;
            part.type     = in.get<int32_t>();
            part.row_size = in.get<uint64_t>();
            part.el_size  = in.get<uint32_t>();
            part.n_embd   = in.get<uint32_t>();
            parts->push_back(part);
        }
    }
    if (in.left() != 0) refuse("bytes after the layout");
    check_layout(layout);
    return layout;
}

}  // namespace lfmfast
