// Matrix products on packed weights and attention, for every instruction set of this CPU: against the same in F64, exactly equal
// whatever else is in the call, and within their buffers.
#include "check.h"
#include "kernels/kernels.h"
#include "kernels/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

using namespace lfmfast::kernels;

namespace {

constexpr weight_type types[] = {weight_type::q4_0, weight_type::q8_0, weight_type::q4_k, weight_type::q5_k, weight_type::q6_k};

using bytes = std::vector<uint8_t>;
using row   = std::vector<float>;

std::mt19937 rng(1);

bool is_k_type(weight_type type) { return layout(type).n_values == 256; }

double half(const uint8_t * p) {
    const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double value = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits >> 15 ? -value : value;
}

// GGUF's definition of each type, one block.
void dequantize(weight_type type, const uint8_t * p, double * y) {
    switch (type) {
        case weight_type::q4_0:
            for (int i = 0; i < 16; ++i) {
                y[i]      = half(p) * ((p[2 + i] & 15) - 8);
                y[i + 16] = half(p) * ((p[2 + i] >> 4) - 8);
            }
            return;
        case weight_type::q8_0:
            for (int i = 0; i < 32; ++i) y[i] = half(p) * static_cast<int8_t>(p[2 + i]);
            return;
        case weight_type::q4_k:
        case weight_type::q5_k: {
            const uint8_t * s  = p + 4;
            const uint8_t * qh = p + 16;
            const uint8_t * qs = p + (type == weight_type::q5_k ? 48 : 16);
            for (int j = 0; j < 8; ++j) {
                const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
                const int min   = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
                for (int i = 0; i < 32; ++i) {
                    int q = j % 2 ? qs[j / 2 * 32 + i] >> 4 : qs[j / 2 * 32 + i] & 15;
                    if (type == weight_type::q5_k) q |= (qh[i] >> j & 1) << 4;
                    y[j * 32 + i] = half(p) * scale * q - half(p + 2) * min;
                }
            }
            return;
        }
        case weight_type::q6_k:
            for (int i = 0; i < 256; ++i) {
                const int part = i % 128 / 32, l = i % 32;
                const int low  = p[i / 128 * 64 + part % 2 * 32 + l] >> (part / 2 * 4) & 15;
                const int high = p[128 + i / 128 * 32 + l] >> (part * 2) & 3;
                y[i] = half(p + 208) * static_cast<int8_t>(p[192 + i / 16]) * ((low | high << 4) - 32);
            }
            return;
    }
}

// GGUF rows of any bits, with scales of about 0.01.
bytes random_rows(weight_type type, int64_t k, int n) {
    const block_layout & block = layout(type);
    bytes                rows(static_cast<size_t>(n * k / block.n_values * block.n_bytes));
    for (auto & b : rows) b = static_cast<uint8_t>(rng());
    for (size_t at = 0; at < rows.size(); at += block.n_bytes) {
        const auto put_scale = [&](int offset) {
            rows[at + offset + 1] = static_cast<uint8_t>((rows[at + offset + 1] & 0x83) | 0x20);
        };
        put_scale(block.scale_at < 0 ? 0 : block.scale_at);
        if (block.scale_at < 0) put_scale(2);
    }
    return rows;
}

std::vector<double> dequantized(weight_type type, const bytes & rows) {
    const block_layout & block = layout(type);
    std::vector<double>  values(rows.size() / block.n_bytes * block.n_values);
    for (size_t b = 0; b < rows.size() / block.n_bytes; ++b) {
        dequantize(type, &rows[b * block.n_bytes], &values[b * block.n_values]);
    }
    return values;
}

row random_row(int64_t k) {
    std::normal_distribution<float> normal;
    row x(static_cast<size_t>(k));
    for (auto & v : x) v = normal(rng) * (rng() % 50 ? 1.0f : 20.0f);
    return x;
}

// Rows quantised, block by block.
std::vector<act_block> quantized(const kernel_set & set, weight_type type, const std::vector<row> & rows) {
    const int64_t k = static_cast<int64_t>(rows[0].size()), n_blocks = (k + block_k - 1) / block_k;
    std::vector<act_block> acts(static_cast<size_t>(n_blocks) * rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        for (int64_t b = 0; b < n_blocks; ++b) {
            const int n = static_cast<int>(std::min<int64_t>(block_k, k - b * block_k));
            set.quantize(type, &rows[i][static_cast<size_t>(b * block_k)], n, &acts[static_cast<size_t>(b) * rows.size() + i]);
        }
    }
    return acts;
}

struct result {
    float values[panel_rows];
};

std::vector<result> products(const kernel_set & set, weight_type type, const bytes & rows, int n_rows,
                             const std::vector<row> & xs) {
    const int64_t k = static_cast<int64_t>(xs[0].size());
    bytes         panel(panel_bytes(type, k));  // exactly as large as it says, for ASan
    pack_panel(type, k, rows.data(), n_rows, panel.data());
    const auto          acts = quantized(set, type, xs);
    std::vector<result> out(xs.size());
    const int           n = static_cast<int>(xs.size());
    set.panel_product(type, panel.data(), k, acts.data(), n, n, &out[0].values, nullptr);
    return out;
}

void check_against_f64(const kernel_set & set, weight_type type, const bytes & rows, int n_rows, const std::vector<row> & xs) {
    const size_t k    = xs[0].size();
    const auto   w    = dequantized(type, rows);
    const auto   acts = quantized(set, type, xs);
    const auto   out  = products(set, type, rows, n_rows, xs);
    double worst = 0, worst_bound = 0;
    for (size_t i = 0; i < xs.size(); ++i) {
        for (int r = 0; r < panel_rows; ++r) {
            double exact = 0, on_quantized = 0, norm = 0, step = 0;
            for (size_t j = 0; j < k && r < n_rows; ++j) {
                const act_block & a = acts[j / block_k * xs.size() + i];
                const double      d = a.d[is_k_type(type) ? 0 : j % block_k / 32], value = w[r * k + j];
                exact += value * xs[i][j];
                on_quantized += value * d * a.q[j % block_k];
                norm += std::fabs(value * d) * 127;
                step += std::fabs(value * d) / 2;
            }
            const double got = out[i].values[r];
            worst       = std::max(worst, std::fabs(got - on_quantized) / (norm + 1e-30));
            worst_bound = std::max(worst_bound, std::fabs(got - exact) / (step * 1.001 + norm * 1e-6 + 1e-30));
        }
    }
    if (worst > 2e-6 || worst_bound > 1) {
        std::ostringstream what;
        what << set.name << " type " << static_cast<int>(type) << " k " << k << ": " << worst << " of the norm, " << worst_bound
             << " of the rounding";
        check::fail(__FILE__, __LINE__, what.str());
    }
}

void test_products(const kernel_set & set, weight_type type) {
    for (int64_t k : {32, 96, 256, 288, 512, 2048, 4608}) {
        if (k % layout(type).n_values) continue;
        for (int n : {1, 2, 3, 7, 8, 13, 37}) {
            if (n > 8 && k > 2048) continue;
            const int        n_rows = n % 2 ? panel_rows : 1 + static_cast<int>(rng() % panel_rows);
            const bytes      rows   = random_rows(type, k, n_rows);
            std::vector<row> xs;
            for (int i = 0; i < n; ++i) xs.push_back(random_row(k));
            check_against_f64(set, type, rows, n_rows, xs);
        }
    }
}

void test_largest_values(const kernel_set & set, weight_type type) {
    const int64_t k = 512;
    for (int fill : {0xff, 0x80, 0x7f, 0x00}) {
        bytes rows = random_rows(type, k, panel_rows);
        const block_layout & block = layout(type);
        for (size_t i = 0; i < rows.size(); ++i) {
            const int at = static_cast<int>(i % block.n_bytes);
            if (at >= (block.scale_at == 0 ? 2 : block.scale_at < 0 ? 4 : 0) && (block.scale_at <= 0 || at < block.scale_at)) {
                rows[i] = static_cast<uint8_t>(fill);
            }
        }
        row up(k, 3.0f), alternating(k, 3.0f), zero(k, 0.0f);
        for (int64_t i = 0; i < k; i += 2) alternating[i] = -3.0f;
        check_against_f64(set, type, rows, panel_rows, {up, alternating, zero});
    }
}

// A row's numbers are its own, to the bit.
void test_every_batch_gives_the_same(const kernel_set & set, weight_type type) {
    const int64_t    k    = is_k_type(type) ? 768 : 736;
    const bytes      rows = random_rows(type, k, panel_rows);
    std::vector<row> xs;
    for (int i = 0; i < 37; ++i) xs.push_back(random_row(k));
    const auto all = products(set, type, rows, panel_rows, xs);
    for (size_t i = 0; i < xs.size(); ++i) {
        const auto alone = products(set, type, rows, panel_rows, {xs[i]});
        CHECK(memcmp(&alone[0], &all[i], sizeof(result)) == 0);
    }
    for (size_t n = 1; n < xs.size(); ++n) {
        const auto last = products(set, type, rows, panel_rows, {xs.end() - static_cast<std::ptrdiff_t>(n), xs.end()});
        CHECK(memcmp(last.data(), &all[xs.size() - n], n * sizeof(result)) == 0);
    }
}

// Weights and quantised rows are integers, and the rest is done in one order: so an answer doesn't depend on the machine. But with
// AMX, K types are rounded once for 256 values.
void test_every_set_gives_the_same(weight_type type) {
    const int64_t    k    = 1024;
    const bytes      rows = random_rows(type, k, panel_rows);
    std::vector<row> xs;
    for (int i = 0; i < 15; ++i) xs.push_back(random_row(k));
    std::vector<result> first;
    for (const kernel_set * const * set = available(); *set; ++set) {
        if (is_k_type(type) && !strcmp((*set)->name, "amx")) continue;
        const auto out = products(**set, type, rows, panel_rows, xs);
        if (first.empty()) first = out;
        CHECK(memcmp(first.data(), out.data(), xs.size() * sizeof(result)) == 0);
    }
}

void test_nan_stays_in_its_row(const kernel_set & set, weight_type type) {
    const bytes      rows = random_rows(type, 512, panel_rows);
    std::vector<row> xs   = {random_row(512), random_row(512), random_row(512), random_row(512)};
    xs[1][300] = std::numeric_limits<float>::quiet_NaN();
    xs[2][7]   = std::numeric_limits<float>::infinity();
    const auto out = products(set, type, rows, panel_rows, xs);
    for (int r = 0; r < panel_rows; ++r) {
        CHECK(std::isfinite(out[0].values[r]) && std::isfinite(out[3].values[r]));
        CHECK(!std::isfinite(out[1].values[r]) && !std::isfinite(out[2].values[r]));
    }
}

void test_packing_can_be_undone(weight_type type) {
    for (int n_rows : {1, 5, panel_rows}) {
        const int64_t k    = 512;
        const bytes   rows = random_rows(type, k, n_rows);
        bytes         panel(panel_bytes(type, k), 0xaa), again(rows.size());
        pack_panel(type, k, rows.data(), n_rows, panel.data());
        unpack_rows(type, k, panel.data(), 0, n_rows, again.data());
        CHECK(rows == again);
        const bytes last(rows.end() - static_cast<std::ptrdiff_t>(rows.size() / n_rows), rows.end());
        bytes       one(last.size());
        unpack_rows(type, k, panel.data(), n_rows - 1, 1, one.data());
        CHECK(last == one);
    }
}

uint16_t half_of(float x) {  // of few digits
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const int exponent = static_cast<int>(bits >> 23 & 255) - 112;
    if (exponent <= 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
    return static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 1023));
}

double value_of(uint16_t x) { return half(reinterpret_cast<const uint8_t *>(&x)); }

constexpr uint16_t hidden = 0xfc00;

// Several query heads, keys and values of a cache, and what is masked out.
struct attention_case {
    int     head_size, n_heads;
    int64_t n_cells;
    std::vector<float>    q;
    std::vector<uint16_t> k, v, mask;

    attention_case(int head_size, int n_heads, int64_t n_cells, int hidden_of_8)
        : head_size(head_size), n_heads(n_heads), n_cells(n_cells), q(random_row(n_heads * (head_size + 3))) {
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < n_cells * (head_size + 5); ++i) {
            k.push_back(half_of(normal(rng)));
            v.push_back(half_of(normal(rng)));
        }
        for (int64_t i = 0; i < n_cells; ++i) {
            const bool hides = static_cast<int>(rng() / 64 % 8) < hidden_of_8 || (hidden_of_8 > 4 && i / 16 % 2);
            mask.push_back(hides ? hidden : i % 5 ? 0 : half_of(-0.75f));
        }
    }

    std::vector<float> run(const kernel_set & set, bool masked = true) const {
        std::vector<float> out(static_cast<size_t>(n_heads * (head_size + 2)), 7.0f);
        attention a = {head_size, n_heads, n_cells, q.data(), head_size + 3, k.data(), head_size + 5, v.data(), head_size + 5,
                       masked ? mask.data() : nullptr, 0.125f, out.data(), head_size + 2};
        set.attend(a);
        return out;
    }

    double exact(int head, int i, bool masked) const {
        double top = -1e300, total = 0, sum = 0;
        std::vector<double> scores;
        for (int64_t j = 0; j < n_cells; ++j) {
            double s = masked ? value_of(mask[j] == hidden ? 0 : mask[j]) : 0.0;
            for (int d = 0; d < head_size; ++d) s += 0.125 * q[head * (head_size + 3) + d] * value_of(k[j * (head_size + 5) + d]);
            scores.push_back(masked && mask[j] == hidden ? -1e300 : s);
            top = std::max(top, scores.back());
        }
        for (int64_t j = 0; j < n_cells; ++j) {
            if (scores[j] == -1e300) continue;
            const double w = std::exp(scores[j] - top);
            total += w;
            sum += w * value_of(v[j * (head_size + 5) + i]);
        }
        return total == 0 ? 0 : sum / total;
    }
};

void test_attention(const kernel_set & set) {
    for (int head_size : {64, 128}) {
        for (int n_heads : {1, 2, 3, 4, 9}) {
            for (int64_t n_cells : {0, 1, 7, 63, 64, 65, 300}) {
                for (int hidden_of_8 : {0, 3, 7, 8}) {
                    const attention_case c(head_size, n_heads, n_cells, hidden_of_8);
                    const bool           masked = hidden_of_8 != 0;
                    const auto           out    = c.run(set, masked);
                    double               worst  = 0;
                    for (int h = 0; h < n_heads; ++h) {
                        const float * row = &out[static_cast<size_t>(h * (head_size + 2))];
                        for (int i = 0; i < head_size; i += 7) worst = std::max(worst, std::fabs(row[i] - c.exact(h, i, masked)));
                        CHECK(row[head_size] == 7.0f && row[head_size + 1] == 7.0f);
                    }
                    CHECK(worst < 1e-5);
                }
            }
        }
    }
}

// Cells that are hidden do not change a bit of it, nor do heads that are computed beside it.
void test_attention_is_of_what_is_seen(const kernel_set & set) {
    const attention_case c(64, 3, 200, 6);
    attention_case       seen = c, other = c;
    seen.k.clear(), seen.v.clear(), seen.mask.clear();
    for (int64_t j = 0; j < c.n_cells; ++j) {
        const auto first = static_cast<std::ptrdiff_t>(j * (64 + 5));
        if (c.mask[j] == hidden) {
            std::fill_n(other.k.begin() + first, 64, uint16_t{0x7e00});  // NaN
            std::fill_n(other.v.begin() + first, 64, uint16_t{0x7e00});
            continue;
        }
        seen.k.insert(seen.k.end(), c.k.begin() + first, c.k.begin() + first + 64 + 5);
        seen.v.insert(seen.v.end(), c.v.begin() + first, c.v.begin() + first + 64 + 5);
        seen.mask.push_back(c.mask[j]);
    }
    seen.n_cells = static_cast<int64_t>(seen.mask.size());
    const auto out = c.run(set);
    CHECK(out == seen.run(set) && out == other.run(set));
    attention_case alone = c;
    alone.n_heads = 1;
    const auto first = alone.run(set);
    CHECK(std::equal(first.begin(), first.begin() + 64, out.begin()));
    for (int64_t j = 0; j < c.n_cells; ++j) {
        if (c.mask[j] != hidden) alone.k[j * (64 + 5) + 3] = 0x7e00;
    }
    CHECK(std::isnan(alone.run(set)[0]));
}

}  // namespace

int main() {
    for (weight_type type : types) {
        test_packing_can_be_undone(type);
        test_every_set_gives_the_same(type);
    }
    for (const kernel_set * const * set = available(); *set; ++set) {
        for (weight_type type : types) {
            test_products(**set, type);
            test_largest_values(**set, type);
            test_every_batch_gives_the_same(**set, type);
            test_nan_stays_in_its_row(**set, type);
        }
        test_attention(**set);
        test_attention_is_of_what_is_seen(**set);
        std::printf("%s: tested\n", (*set)->name);
    }
    return check::failures != 0;
}
