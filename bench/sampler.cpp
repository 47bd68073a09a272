// Time per token of lfmfast's sampler and of llama.cpp's chain: same rows, one thread, in turns. Prints tab-separated lines for
// bench/sampler.py. Linked with the libraries of the installed package.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "engine/sampler.h"
#include "engine/sampler_pool.h"
#include "engine/simd.h"
#include "llama.h"

namespace {

using clock_type = std::chrono::steady_clock;
using row        = std::vector<float>;

double micros(const std::function<void()> & work) {
    const auto begin = clock_type::now();
    work();
    return std::chrono::duration<double, std::micro>(clock_type::now() - begin).count();
}

double median(std::vector<double> & x) {
    std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
    return x[x.size() / 2];
}

// What llama.cpp's common_sampler does per token: list all candidates, run the chain, accept.
struct llama_chain {
    llama_sampler *               chain;
    std::vector<llama_token_data> cur;

    llama_chain(const lfmfast::sampler_params & p, int n) : cur(n) {
        auto params    = llama_sampler_chain_default_params();
        params.no_perf = true;
        chain          = llama_sampler_chain_init(params);
        for (auto * stage : {llama_sampler_init_penalties(n, p.penalty_last_n, p.penalty_repeat, 0.0f, 0.0f),
                             llama_sampler_init_top_k(p.top_k), llama_sampler_init_top_p(p.top_p, 0),
                             llama_sampler_init_min_p(p.min_p, 0), llama_sampler_init_temp_ext(p.temp, 0.0f, 1.0f),
                             llama_sampler_init_dist(p.seed)}) {
            llama_sampler_chain_add(chain, stage);
        }
    }
    ~llama_chain() { llama_sampler_free(chain); }

    int32_t sample(const float * logits) {
        for (size_t i = 0; i < cur.size(); ++i) cur[i] = {static_cast<llama_token>(i), logits[i], 0.0f};
        llama_token_data_array array = {cur.data(), cur.size(), -1, false};
        llama_sampler_apply(chain, &array);
        const int32_t token = array.data[array.selected].id;
        llama_sampler_accept(chain, token);
        return token;
    }
};

// What llama-server does per token for n_probs (get_token_probabilities).
float server_log_probs(const float * logits, int n, int token, size_t n_top, std::vector<std::pair<int, float>> & top) {
    std::vector<llama_token_data> cur(n);
    for (int i = 0; i < n; ++i) cur[i] = {i, logits[i], 0.0f};
    std::partial_sort(cur.begin(), cur.begin() + n_top, cur.end(),
                      [](const llama_token_data & a, const llama_token_data & b) { return a.logit > b.logit; });
    float sum = 0.0f;
    for (auto & t : cur) sum += t.p = expf(t.logit - cur[0].logit);
    for (auto & t : cur) t.p /= sum;
    top.clear();
    for (size_t i = 0; i < n_top; ++i) top.emplace_back(cur[i].id, logf(cur[i].p));
    for (const auto & t : cur) {
        if (t.id == token) return logf(t.p);
    }
    return 0.0f;
}

std::vector<row> make_rows(int n, int count) {
    std::mt19937                    rng(1);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::vector<row>                rows(count, row(n));
    for (auto & r : rows) {
        for (auto & x : r) x = normal(rng);
    }
    return rows;
}

volatile int64_t sink;

// A round of 16 calls of each side in turns: both see the same machine, and each its own caches. Medians and minima per call.
void compare(const char * name, int n, int rounds, const std::function<void(int)> & ours,
             const std::function<void(int)> & theirs) {
    constexpr int       n_calls = 16;
    std::vector<double> times[2];
    for (int round = -1; round < rounds; ++round) {  // the first is not counted
        for (int side = 0; side < 2; ++side) {
            for (int i = 0; i < n_calls; ++i) {
                const double t = micros([&] { (side ? theirs : ours)(i % 4); });
                if (round >= 0 && i >= 4) times[side].push_back(t);
            }
        }
    }
    const auto best = [](const std::vector<double> & x) { return *std::min_element(x.begin(), x.end()); };
    std::printf("pair\t%d\t%s\t%s\t%.3f\t%.3f\t%.3f\t%.3f\n", n, name, lfmfast::simd().name, median(times[0]), best(times[0]),
                median(times[1]), best(times[1]));
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
    lfmfast::sampler_params lfm25, lfm2, lfm25_8b, defaults, greedy, plain;
    lfm25.temp = 0.1f, lfm25.top_k = 50, lfm25.penalty_repeat = 1.05f;
    lfm2.temp = 0.3f, lfm2.min_p = 0.15f, lfm2.penalty_repeat = 1.05f;
    lfm25_8b.temp = 0.2f, lfm25_8b.top_k = 80, lfm25_8b.penalty_repeat = 1.05f;
    defaults.temp = 0.8f, defaults.top_k = 40, defaults.top_p = 0.95f, defaults.min_p = 0.05f;
    greedy.temp = 0.0f;
    plain.temp = 0.7f;
    const std::vector<std::pair<const char *, lfmfast::sampler_params *>> chains = {
        {"LFM2.5 defaults", &lfm25},       {"LFM2 defaults", &lfm2}, {"LFM2.5-8B defaults", &lfm25_8b},
        {"llama.cpp's defaults", &defaults}, {"greedy", &greedy},      {"temperature only", &plain}};

    for (const int n : {65536, 128000}) {
        const auto rows = make_rows(n, 4);  // 1 MB at 65,536: in L2, where a decode step leaves them
        for (const auto & variant : lfmfast::simd_available()) {
            lfmfast::simd_use(variant);
            std::vector<float>  maxima(n / 64);
            std::vector<double> read;
            for (int i = 0; i < rounds * 12; ++i) {
                read.push_back(micros([&] { sink = lfmfast::simd().block_max(rows[i % 4].data(), n / 64, maxima.data()); }));
            }
            std::printf("read\t%d\t%s\t%.3f\n", n, variant.c_str(), median(read));
            for (const auto & chain : chains) {
                auto params = *chain.second;
                params.seed = 42;
                lfmfast::sampler ours(params, n);
                llama_chain      theirs(params, n);
                for (int i = 0; i < 64; ++i) {  // full windows
                    ours.accept(i * 37 % n);
                    llama_sampler_accept(theirs.chain, i * 37 % n);
                }
                std::vector<int32_t> tokens[2];
                compare(chain.first, n, rounds,
                        [&](int i) {
                            tokens[0].push_back(ours.sample(rows[i].data()));
                            ours.accept(tokens[0].back());
                        },
                        [&](int i) { tokens[1].push_back(theirs.sample(rows[i].data())); });
                if (tokens[0] != tokens[1]) {
                    std::fprintf(stderr, "%s, %d logits, %s: not the same tokens\n", chain.first, n, variant.c_str());
                    return 1;
                }
            }
            std::vector<lfmfast::token_logprob>  top;
            std::vector<std::pair<int, float>> top2;
            compare("logprobs 5", n, rounds, [&](int i) { sink = lfmfast::log_probs(rows[i].data(), n, 17, 5, top) > 0; },
                    [&](int i) { sink = server_log_probs(rows[i].data(), n, 17, 5, top2) > 0; });
        }
        lfmfast::simd_use(lfmfast::simd_available()[0]);

        const int  n_rows = 16;
        row        batch;
        for (const auto & r : make_rows(n, n_rows)) batch.insert(batch.end(), r.begin(), r.end());
        std::vector<std::unique_ptr<lfmfast::shared_sampler>> owned;
        std::vector<lfmfast::shared_sampler *>                samplers;
        for (int i = 0; i < n_rows; ++i) {
            lfm25.seed = i;
            owned.emplace_back(new lfmfast::shared_sampler(lfm25, n));
            samplers.push_back(owned.back().get());
        }
        const auto run = [&](int n_threads) { sink = lfmfast::sample_batch(batch.data(), n, samplers, n_threads)[0].token; };
        compare("16 rows, two threads against one", n, rounds, [&](int) { run(2); }, [&](int) { run(1); });
    }
    return 0;
}
