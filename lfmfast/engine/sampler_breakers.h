// DRY's sequence breakers are strings; the sampler sees tokens. Pure: no llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/sampler.h"

namespace lfmfast {

// As llama.cpp finds them: every token whose text contains a breaker; and every token whose text ends with the beginning of
// one, followed by the tokens of its rest. `word` gives a token's text with control tokens written out, `tokenize` takes text
// without them. Walks the whole vocabulary.
dry_breakers find_breakers(const std::vector<std::string> & texts, int32_t n_vocab,
                           const std::function<std::string(int32_t)> & word,
                           const std::function<std::vector<int32_t>(const std::string &)> & tokenize);

// Remembers what was found for one vocabulary. May be used from several threads.
class breaker_cache {
  public:
    dry_breakers find(const std::vector<std::string> & texts, int32_t n_vocab, const std::function<std::string(int32_t)> & word,
                      const std::function<std::vector<int32_t>(const std::string &)> & tokenize);

  private:
    std::mutex                                        mutex_;
    std::map<std::vector<std::string>, dry_breakers> found_;
};

}  // namespace lfmfast
