// llama.cpp's side of bench/grammar.py: its converter of JSON schemas and its grammar sampler, in native code of one thread.
// Reads lines: "S schema" begins a case, "T id id ..." asks whether tokens are accepted, "M id id ..." for the time of each mask.
// Prints one line for each: the reason of a refusal or microseconds to convert and to load; 1 or 0; microseconds.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "json-schema-to-grammar.h"
#include "llama.h"

namespace {

using clock_type = std::chrono::steady_clock;

double micros_since(clock_type::time_point begin) {
    return std::chrono::duration<double, std::micro>(clock_type::now() - begin).count();
}

using grammar_ptr = std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)>;

// Whether the grammar lets this one token through.
bool allows(llama_sampler * grammar, llama_token token) {
    llama_token_data       one  = {token, 1.0f, 0.0f};
    llama_token_data_array data = {&one, 1, -1, false};
    llama_sampler_apply(grammar, &data);
    return std::isfinite(data.data[0].logit);
}

std::vector<llama_token> ids(const std::string & line) {
    std::istringstream       in(line.substr(1));
    std::vector<llama_token> out;
    for (llama_token token; in >> token;) out.push_back(token);
    return out;
}

bool accepts(llama_sampler * grammar, const std::vector<llama_token> & tokens, llama_token end) {
    for (const llama_token token : tokens) {
        if (!allows(grammar, token)) return false;
        llama_sampler_accept(grammar, token);
    }
    return allows(grammar, end);
}

void masks(llama_sampler * grammar, const std::vector<llama_token> & tokens, int n_vocab) {
    std::vector<llama_token_data> all(n_vocab);
    for (const llama_token token : tokens) {
        for (int i = 0; i < n_vocab; ++i) all[i] = {i, 0.0f, 0.0f};
        llama_token_data_array data  = {all.data(), all.size(), -1, false};
        const auto             begin = clock_type::now();
        llama_sampler_apply(grammar, &data);
        std::printf("%.1f ", micros_since(begin));
        llama_sampler_accept(grammar, token);
    }
    std::printf("\n");
}

}  // namespace

int main(int, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    auto params       = llama_model_default_params();
    params.vocab_only = true;
    const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(llama_model_load_from_file(argv[1], params), llama_model_free);
    if (!model) return 1;
    const llama_vocab * vocab = llama_model_get_vocab(model.get());
    grammar_ptr         grammar(nullptr, llama_sampler_free);
    for (std::string line; std::getline(std::cin, line);) {
        if (line[0] == 'S') {
            grammar.reset();
            try {
                auto              begin   = clock_type::now();
                const std::string text    = json_schema_to_grammar(common_json::parse(line.substr(2)));
                const double      convert = micros_since(begin);
                begin                     = clock_type::now();
                grammar.reset(llama_sampler_init_grammar(vocab, text.c_str(), "root"));
                std::printf(grammar ? "ok %.1f %.1f\n" : "the grammar is not read\n", convert, micros_since(begin));
            } catch (const std::exception & e) {
                std::string reason = e.what();
                for (char & c : reason) c = c == '\n' ? ' ' : c;
                std::printf("%s\n", reason.c_str());
            }
        } else if (!grammar) {
            std::printf("0\n");
        } else {
            const grammar_ptr fresh(llama_sampler_clone(grammar.get()), llama_sampler_free);
            try {
                if (line[0] == 'T') {
                    std::printf("%d\n", accepts(fresh.get(), ids(line), llama_vocab_eot(vocab)) ? 1 : 0);
                } else {
                    masks(fresh.get(), ids(line), llama_vocab_n_tokens(vocab));
                }
            } catch (const std::exception & e) {
                std::printf("%s\n", e.what());
            }
        }
        std::fflush(stdout);
    }
    return 0;
}
