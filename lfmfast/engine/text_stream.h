// From the bytes of sampled tokens to text that may be shown: complete UTF-8 only, and nothing of a stop string.
#pragma once

#include <string>
#include <vector>

namespace lfmfast {

class text_stream {
  public:
    // Empty stop strings are refused with invalid_argument.
    explicit text_stream(std::vector<std::string> stops);

    // Adds bytes and returns what may be shown now. Held back: an incomplete UTF-8 sequence at the end, and a tail that
    // may still become a stop string. Once a stop string is complete, returns the text before the earliest one and drops
    // the rest; later calls return nothing.
    std::string push(const std::string & bytes);

    // What was held back, when generation ends without a stop string. An incomplete UTF-8 sequence is given as it is.
    std::string flush();

    bool                stopped() const { return stop_ >= 0; }
    const std::string & stop() const { return stops_[static_cast<size_t>(stop_)]; }

  private:
    std::vector<std::string> stops_;
    std::string              held_;
    int                      stop_ = -1;
};

// Length of the tail of `bytes` that is the beginning of a valid UTF-8 sequence but not all of it (0 to 3).
size_t incomplete_utf8_tail(const std::string & bytes);

}  // namespace lfmfast
