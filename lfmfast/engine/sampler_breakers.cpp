#include "engine/sampler_breakers.h"

#include <algorithm>
#include <set>

namespace lfmfast {

dry_breakers find_breakers(const std::vector<std::string> & texts, int32_t n_vocab,
                           const std::function<std::string(int32_t)> & word,
                           const std::function<std::vector<int32_t>(const std::string &)> & tokenize) {
    constexpr size_t max_bytes = 40, max_tail = 20;  // llama.cpp's limits
    std::set<std::vector<int32_t>>    sequences;
    std::map<std::string, std::vector<int32_t>> tails;  // few rests occur over and over
    for (int32_t token = 0; token < n_vocab; ++token) {
        const std::string w = word(token);
        for (const auto & text : texts) {
            const std::string breaker = text.substr(0, max_bytes);
            if (breaker.empty()) continue;
            if (w.find(breaker) != std::string::npos) {
                sequences.insert({token});
                continue;
            }
            for (size_t n = std::min(w.size(), breaker.size() - 1); n > 0; --n) {
                if (w.compare(w.size() - n, n, breaker, 0, n) != 0) continue;
                const std::string rest = breaker.substr(n);
                auto              it   = tails.find(rest);
                if (it == tails.end()) {
                    it = tails.emplace(rest, tokenize(rest)).first;
                    if (it->second.size() > max_tail) it->second.resize(max_tail);
                }
                std::vector<int32_t> sequence = {token};
                sequence.insert(sequence.end(), it->second.begin(), it->second.end());
                sequences.insert(std::move(sequence));
            }
        }
    }
    return make_dry_breakers({sequences.begin(), sequences.end()});
}

dry_breakers breaker_cache::find(const std::vector<std::string> & texts, int32_t n_vocab,
                                 const std::function<std::string(int32_t)> & word,
                                 const std::function<std::vector<int32_t>(const std::string &)> & tokenize) {
    constexpr size_t            most = 16;  // sets of strings, in case a server's clients send ever new ones
    std::lock_guard<std::mutex> lock(mutex_);
    auto                        it = found_.find(texts);
    if (it == found_.end()) {
        if (found_.size() >= most) found_.clear();
        it = found_.emplace(texts, find_breakers(texts, n_vocab, word, tokenize)).first;
    }
    return it->second;
}

}  // namespace lfmfast
