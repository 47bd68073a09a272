// The sampler without llama.cpp: each instruction set against plain loops, the fused chains against the list of candidates, and
// random parameters and rows, which must give a token or an error and nothing else. tests/test_sampler.py has the oracle.
#include "check.h"
#include "engine/sampler.h"
#include "engine/sampler_breakers.h"
#include "engine/sampler_pool.h"
#include "engine/simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <thread>

using namespace lfmfast;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_     = std::numeric_limits<float>::quiet_NaN();

using row = std::vector<float>;

row normal_row(std::mt19937 & rng, size_t n, float width = 3.0f) {
    std::normal_distribution<float> normal(0.0f, width);
    row r(n);
    for (auto & x : r) x = normal(rng);
    return r;
}

template <typename F>
void for_each_simd(F f) {
    for (const auto & name : simd_available()) {
        CHECK(simd_use(name));
        CHECK_EQ(std::string(simd().name), name);
        f();
    }
    simd_use(simd_available()[0]);
}

void test_simd() {
    CHECK(!simd_use("none"));
    CHECK_EQ(simd_available().back(), std::string("scalar"));
    std::mt19937 rng(1);
    for_each_simd([&] {
        const auto & k = simd();
        for (int round = 0; round < 200; ++round) {
            const size_t n_blocks = 1 + rng() % 5, n = n_blocks * simd_block;
            row          r = normal_row(rng, n);
            for (int i = 0; i < 5; ++i) r[rng() % n] = -infinity;
            if (round % 4 == 0) std::fill(r.begin(), r.begin() + simd_block, -infinity);
            row maxima(n_blocks);
            CHECK(k.block_max(r.data(), n_blocks, maxima.data()));
            const float floor = r[rng() % n];
            size_t      count = 0;
            for (size_t b = 0; b < n_blocks; ++b) {
                const float * x = &r[b * simd_block];
                CHECK_EQ(maxima[b], *std::max_element(x, x + simd_block));
                uint64_t bits = 0;
                for (size_t i = 0; i < simd_block; ++i) bits |= uint64_t(x[i] >= floor) << i;
                CHECK_EQ(k.at_least(x, floor), bits);
                for (; bits; bits &= bits - 1) ++count;
            }
            CHECK_EQ(k.count(r.data(), n, floor), count);
            r[rng() % n] = nan_;
            CHECK(!k.block_max(r.data(), n_blocks, maxima.data()));
        }
        for (const float temp : {1.0f, 0.1f, 0.3f, 0.7f, 1.7f, 100.0f}) {
            for (int round = 0; round < 300; ++round) {
                row r = normal_row(rng, simd_block, round % 2 ? 4.0f : 0.1f);
                r[rng() % simd_block] = -infinity;
                const float max  = *std::max_element(r.begin(), r.end()) / temp;
                double      sum  = 0.0, out = 0.0;
                for (const float x : r) sum += std::exp(static_cast<double>(x / temp - max));
                k.exp_sums(r.data(), 1, temp, max, &out);
                CHECK(std::fabs(out - sum) <= 1.5e-7 * sum);
            }
        }
    });
}

// The same chain, once fused and once over the list of candidates: a top_n_sigma that masks nothing keeps it off the fused way.
void test_fused_equals_listed() {
    std::mt19937 rng(2);
    const auto   pick = [&](std::vector<float> v) { return v[rng() % v.size()]; };
    int          n_rows = 0, n_tied = 0;
    for_each_simd([&] {
        for (int round = 0; round < 150; ++round) {
            const int32_t n = static_cast<int32_t>(pick({1, 2, 63, 64, 65, 700, 4096, 9001, 20000}));
            sampler_params p;
            p.seed           = rng();
            p.temp           = pick({0.0f, 0.1f, 0.7f, 1.0f, 1.5f});
            p.top_k          = static_cast<int32_t>(pick({0, 0, 1, 5, 40, 50, 128}));
            p.min_p          = pick({0.0f, 0.0f, 0.05f, 0.3f});
            p.top_p          = pick({1.0f, 1.0f, 0.9f, 0.1f});
            p.penalty_repeat = pick({1.0f, 1.05f, 1.5f, 0.9f});
            p.penalty_freq   = pick({0.0f, 0.0f, 0.2f});
            p.penalty_last_n = static_cast<int32_t>(pick({-1, 3, 64}));
            p.dry_multiplier = pick({0.0f, 0.0f, 1.0f});
            p.dry_sequence_breakers = make_dry_breakers({{1}, {2, 3}, {}});
            if (round % 3 == 0) p.logit_bias = {{n - 1, 4.0f}, {0, -2.0f}, {n - 1, -0.5f}};
            sampler_params listed = p;
            listed.top_n_sigma    = 1e30f;
            sampler a(p, n), b(listed, n);
            for (int i = 0; i < 24; ++i) {
                row r = normal_row(rng, n, i % 3 == 2 ? 0.02f : 3.0f);
                if (i % 4 == 1) for (auto & x : r) x = std::round(x * 2) / 2;
                if (i % 8 == 3) for (auto & x : r) x = rng() % 50 ? -infinity : x;
                r[rng() % n] = 5.0f;
                const row     before = r;
                const int32_t token  = a.sample(r.data());
                CHECK_EQ(token, b.sample(r.data()));
                CHECK(r == before);
                a.accept(token);
                b.accept(token);
                ++n_rows;
            }
            n_tied += static_cast<int>(a.n_tied());
            CHECK_EQ(b.n_tied(), 0u);
        }
    });
    CHECK(n_tied > n_rows / 100 && n_tied < n_rows);  // both ways were taken
}

// The draw: (x0 + x1 * 2^32) / 2^64 of the Mersenne twister, one per token whatever the chain.
void test_draws() {
    const row r(1000, 0.0f);
    for (const float temp : {1.0f, 0.5f}) {
        sampler_params p;
        p.seed = 7;
        p.temp = temp;
        sampler      s(p, 1000);
        std::mt19937 rng(7);
        for (int i = 0; i < 100; ++i) {
            const double x0 = rng(), x1 = rng();
            const int    expected = static_cast<int>(std::ceil((x0 + x1 * 4294967296.0) / 18446744073709551616.0 * 1000.0)) - 1;
            CHECK_EQ(s.sample(r.data()), expected);
            if (i % 10 == 9) {  // a row with one possible token takes a draw as well
                row one(1000, -infinity);
                one[3] = 1.0f;
                CHECK_EQ(s.sample(one.data()), 3);
                rng.discard(2);
            }
        }
    }
    sampler_params p;
    p.seed = 0xFFFFFFFF;
    CHECK(sampler(p, 10).seed() != sampler(p, 10).seed());
    p.seed = 0;
    CHECK_EQ(sampler(p, 10).seed(), 0u);
}

void test_breakers() {
    const std::vector<std::string> words = {"a", "b", "ab", "xa", "abc", "c", "bc", "xabcy", "", "aa"};
    int  n_words = 0;
    const auto word     = [&](int32_t t) { return ++n_words, words[static_cast<size_t>(t)]; };
    const auto tokenize = [](const std::string & text) {  // longest first would be "bc"; any will do
        std::vector<int32_t> out;
        for (const char c : text) out.push_back(c == 'a' ? 0 : c == 'b' ? 1 : 5);
        return out;
    };
    const auto shown = [](const dry_breakers & found) {
        std::string out;
        for (const auto & b : *found) {
            out += std::to_string(b.head) + "(";
            for (const int32_t t : b.tail) out += std::to_string(t);
            out += ")";
        }
        return out;
    };
    const int32_t n = static_cast<int32_t>(words.size());
    CHECK_EQ(shown(find_breakers({"abc"}, n, word, tokenize)), std::string("0(15)2(5)3(15)4()7()9(15)"));
    CHECK_EQ(shown(find_breakers({"c", ""}, n, word, tokenize)), std::string("4()5()6()7()"));
    CHECK_EQ(shown(find_breakers({"aab"}, n, word, tokenize)), std::string("0(01)3(01)9(01)9(1)"));
    CHECK_EQ(shown(find_breakers({std::string(60, 'a')}, n, word, tokenize)).substr(0, 24), "0(" + std::string(20, '0') + ")3");
    breaker_cache cache;
    n_words = 0;
    CHECK(cache.find({"abc"}, n, word, tokenize) == cache.find({"abc"}, n, word, tokenize));
    CHECK_EQ(n_words, n);
    CHECK_EQ(shown(cache.find({"c"}, n, word, tokenize)), std::string("4()5()6()7()"));
}

void test_windows() {
    std::mt19937   rng(3);
    sampler_params p;
    p.temp            = 0.0f;
    p.penalty_present = 10.0f;
    for (const int32_t last_n : {1, 2, 7, 64, -1}) {
        p.penalty_last_n = last_n;
        sampler              s(p, 50);
        std::vector<int32_t> all;
        for (int i = 0; i < 300; ++i) {
            row r = normal_row(rng, 50);
            std::vector<bool> penalised(50);
            const size_t      n = last_n < 0 ? all.size() : std::min<size_t>(all.size(), last_n);
            for (size_t k = 0; k < n; ++k) penalised[all[all.size() - 1 - k]] = true;
            row q = r;
            for (int t = 0; t < 50; ++t) q[t] -= penalised[t] ? 10.0f : 0.0f;
            CHECK_EQ(s.sample(r.data()), static_cast<int32_t>(std::max_element(q.begin(), q.end()) - q.begin()));
            all.push_back(static_cast<int32_t>(rng() % 20));
            s.accept(all.back());
        }
    }
    sampler s(p, 50);
    CHECK_THROWS(invalid_argument, s.accept(50));
    CHECK_THROWS(invalid_argument, s.accept(-1));
}

void test_errors() {
    for_each_simd([] {
        for (const size_t n : {1, 64, 1000, 5000}) {
            for (const float bad : {nan_, infinity, -infinity}) {
                for (int chain = 0; chain < 5; ++chain) {
                    sampler_params p;
                    p.seed  = 1;
                    p.temp  = chain == 0 ? 0.0f : 0.5f;
                    p.top_k = chain == 1 ? 10 : 0;
                    p.min_p = chain == 2 ? 0.1f : 0.0f;
                    p.top_p = chain == 3 ? 0.9f : 1.0f;
                    sampler s(p, static_cast<int32_t>(n)), untouched(s);
                    row     good(n, 0.5f), r = good;
                    if (bad == -infinity) std::fill(r.begin(), r.end(), bad);
                    r[n - 1] = bad;
                    CHECK_THROWS(sampling, s.sample(r.data()));
                    for (int i = 0; i < 5; ++i) CHECK_EQ(s.sample(good.data()), untouched.sample(good.data()));
                    std::vector<token_logprob> top;
                    CHECK_THROWS(sampling, log_probs(r.data(), static_cast<int32_t>(n), 0, 3, top));
                }
            }
        }
    });
    const auto refused = [](const std::function<void(sampler_params &)> & change) {
        sampler_params p;
        change(p);
        CHECK_THROWS(invalid_argument, sampler(p, 100));
    };
    refused([](sampler_params & p) { p.logit_bias = {{100, 1.0f}}; });
    refused([](sampler_params & p) { p.logit_bias = {{-1, 1.0f}}; });
    refused([](sampler_params & p) { p.logit_bias = {{0, nan_}}; });
    refused([](sampler_params & p) { p.penalty_repeat = 0.0f; });
    refused([](sampler_params & p) { p.penalty_last_n = -2; });
    refused([](sampler_params & p) { p.temp = nan_; });
    refused([](sampler_params & p) { p.min_p = 1.5f; });
    refused([](sampler_params & p) { p.mirostat = 3; });
    refused([](sampler_params & p) { p.stages = {sampler_stage::top_k, sampler_stage::top_k}; });
    CHECK_THROWS(invalid_argument, sampler(sampler_params(), 0));
}

// Random bits as parameters and logits.
void fuzz() {
    std::mt19937 rng(4);
    const auto   bits = [&]() {
        const uint32_t u = rng();
        float          f;
        std::memcpy(&f, &u, sizeof f);
        return f;
    };
    const auto any = [&](float sane) { return rng() % 8 ? sane : bits(); };
    const auto unit = [&]() { return static_cast<float>(rng() % 1001) / 1000.0f; };
    int        n_sampled = 0, n_failed = 0, n_refused = 0;
    for (int round = 0; round < 3000; ++round) {
        const int32_t n = 1 + static_cast<int32_t>(round % 50 ? rng() % 300 : rng() % 9000);
        simd_use(simd_available()[rng() % simd_available().size()]);
        sampler_params p;
        p.seed              = rng();
        p.temp              = any(unit() * 2);
        p.top_k             = rng() % 3 ? static_cast<int32_t>(rng() % 200) : static_cast<int32_t>(rng());
        p.top_p             = any(unit());
        p.min_p             = rng() % 2 ? any(unit()) : 0.0f;
        p.typ_p             = rng() % 4 ? 1.0f : any(unit());
        p.top_n_sigma       = rng() % 4 ? -1.0f : any(unit() * 3);
        p.xtc_probability   = rng() % 3 ? 0.0f : any(unit());
        p.xtc_threshold     = any(unit() / 2);
        p.dynatemp_range    = rng() % 4 ? 0.0f : any(unit());
        p.dynatemp_exponent = any(unit() * 2);
        p.penalty_repeat    = any(unit() + 0.5f);
        p.penalty_freq      = any(unit());
        p.penalty_present   = any(unit());
        p.penalty_last_n    = static_cast<int32_t>(rng() % 100) - 2;
        p.dry_multiplier    = rng() % 2 ? 0.0f : any(unit());
        p.dry_base          = any(1.0f + unit());
        p.dry_allowed_length = static_cast<int32_t>(rng() % 5) - 1;
        p.dry_penalty_last_n = static_cast<int32_t>(rng() % 50) - 2;
        std::vector<std::vector<int32_t>> breakers(rng() % 4);
        for (auto & b : breakers) {
            for (size_t i = rng() % 4; i > 0; --i) b.push_back(static_cast<int32_t>(rng() % 20));
        }
        p.dry_sequence_breakers = rng() % 4 ? make_dry_breakers(breakers) : nullptr;
        p.mirostat     = rng() % 6 ? 0 : static_cast<int32_t>(rng() % 4) - 1;
        p.mirostat_tau = any(unit() * 8);
        p.mirostat_eta = any(unit());
        p.min_keep     = rng() % 3 ? 0 : static_cast<int32_t>(rng() % 400) - 5;
        for (size_t i = rng() % 4; i > 0; --i) p.logit_bias.emplace_back(static_cast<int32_t>(rng() % n), any(unit()));
        std::shuffle(p.stages.begin(), p.stages.end(), rng);
        if (rng() % 2) p.stages.resize(rng() % 10);
        std::unique_ptr<sampler> s;
        try {
            s.reset(new sampler(p, n));
        } catch (const error & e) {
            CHECK(e.code == error_code::invalid_argument);
            ++n_refused;
            continue;
        }
        for (int i = 0; i < 12; ++i) {
            row r = normal_row(rng, n, rng() % 4 ? 3.0f : 1e-3f);
            for (int k = static_cast<int>(rng() % 3); k > 0; --k) r[rng() % n] = rng() % 16 ? -infinity : bits();
            if (rng() % 8 == 0) for (auto & x : r) x = std::round(x);
            if (rng() % 16 == 0) for (auto & x : r) x *= 1e37f;
            try {
                const int32_t token = s->sample(r.data());
                CHECK(token >= 0 && token < n);
                s->accept(token % 20 < n ? token % 20 : 0);
                ++n_sampled;
            } catch (const error & e) {
                CHECK(e.code == error_code::sampling);
                ++n_failed;
            }
        }
        if (rng() % 4 == 0) s->reset();
    }
    simd_use(simd_available()[0]);
    CHECK(n_sampled > 10000);
    CHECK(n_failed > 0 && n_refused > 0);
}

void test_log_probs() {
    std::mt19937 rng(5);
    for_each_simd([&] {
        for (const int32_t n : {1, 2, 100, 5000, 20000}) {
            row r = normal_row(rng, n);
            if (n > 2) for (auto & x : r) x = std::round(x * 8) / 8;
            double sum = 0.0;
            for (const float x : r) sum += std::exp(static_cast<double>(x));
            std::vector<token_logprob> top;
            const int32_t token = static_cast<int32_t>(rng() % n);
            CHECK(std::fabs(log_probs(r.data(), n, token, 10, top) - (r[token] - std::log(sum))) < 2e-6);
            CHECK_EQ(top.size(), static_cast<size_t>(std::min(n, 10)));
            for (size_t i = 0; i < top.size(); ++i) {
                CHECK(std::fabs(top[i].logprob - (r[top[i].token] - std::log(sum))) < 2e-6);
                const auto better = std::count_if(r.begin(), r.end(), [&](const float & x) {
                    return x > r[top[i].token] || (x == r[top[i].token] && &x < &r[top[i].token]);
                });
                CHECK_EQ(static_cast<size_t>(better), i);
            }
        }
    });
    const row r(4, 0.0f);
    std::vector<token_logprob> top;
    CHECK_THROWS(invalid_argument, log_probs(r.data(), 4, 4, 1, top));
    CHECK_THROWS(invalid_argument, log_probs(r.data(), 4, -1, 1, top));
}

void test_batch() {
    std::mt19937   rng(6);
    const int32_t  n = 5000;
    sampler_params p;
    p.top_k = 40;
    p.penalty_repeat = 1.1f;
    std::vector<std::vector<int32_t>> streams;
    const row                         rows = normal_row(rng, n * 16);
    for (const int n_threads : {1, 2, 3, 8}) {
        std::vector<std::unique_ptr<shared_sampler>> owned;
        std::vector<shared_sampler *>                samplers;
        for (uint32_t i = 0; i < 16; ++i) {
            p.seed = i;
            owned.emplace_back(new shared_sampler(p, n));
            samplers.push_back(owned.back().get());
        }
        streams.emplace_back();
        for (int step = 0; step < 50; ++step) {
            const auto out = sample_batch(rows.data(), n, samplers, n_threads);
            for (size_t i = 0; i < 16; ++i) {
                CHECK(out[i].error.empty());
                streams.back().push_back(out[i].token);
                samplers[i]->accept({out[i].token});
            }
        }
        CHECK(streams.back() == streams.front());
        auto twice = samplers;
        twice[3]   = twice[5];
        CHECK_THROWS(invalid_argument, sample_batch(rows.data(), n, twice, n_threads));
        CHECK_THROWS(invalid_argument, sample_batch(rows.data(), n - 1, samplers, n_threads));
        row bad = rows;
        bad[7 * n + 11] = nan_;
        const auto out = sample_batch(bad.data(), n, samplers, n_threads);
        for (size_t i = 0; i < 16; ++i) CHECK_EQ(out[i].error.empty(), i != 7);
    }
    CHECK(sample_batch(rows.data(), n, {}, 2).empty());
    // Several callers at once, and one sampler from several threads.
    p.seed = 1;
    shared_sampler shared(p, n);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            shared_sampler a(p, n), b(p, n);
            for (int i = 0; i < 50; ++i) {
                CHECK(sample_batch(rows.data(), n, {&a, &b}, 2).size() == 2);
                shared.accept({shared.sample(rows.data())});
            }
        });
    }
    for (auto & t : threads) t.join();
}

}  // namespace

int main() {
    test_simd();
    test_fused_equals_listed();
    test_draws();
    test_breakers();
    test_windows();
    test_errors();
    test_log_probs();
    test_batch();
    fuzz();
    return check::failures != 0;
}
