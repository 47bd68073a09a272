#include "engine/text_stream.h"

#include "engine/error.h"

#include <algorithm>

namespace lfmfast {

namespace {

// Whether `c` may be byte number `index` (1 based) of a sequence that begins with `lead`; Unicode standard, table 3-7.
bool continues(unsigned char lead, size_t index, unsigned char c) {
    if (index > 1) {
        return (c & 0xC0) == 0x80;
    }
    switch (lead) {
        case 0xE0: return c >= 0xA0 && c <= 0xBF;
        case 0xED: return c >= 0x80 && c <= 0x9F;
        case 0xF0: return c >= 0x90 && c <= 0xBF;
        case 0xF4: return c >= 0x80 && c <= 0x8F;
        default:   return (c & 0xC0) == 0x80;
    }
}

size_t sequence_length(unsigned char lead) {
    if (lead >= 0xC2 && lead <= 0xDF) return 2;
    if (lead >= 0xE0 && lead <= 0xEF) return 3;
    if (lead >= 0xF0 && lead <= 0xF4) return 4;
    return 1;
}

}  // namespace

size_t incomplete_utf8_tail(const std::string & bytes) {
    const size_t n = bytes.size();
    for (size_t back = 1; back <= std::min<size_t>(3, n); ++back) {
        const auto lead = static_cast<unsigned char>(bytes[n - back]);
        if ((lead & 0xC0) == 0x80) {
            continue;  // a continuation byte: look for its lead further back
        }
        if (sequence_length(lead) <= back) {
            return 0;
        }
        for (size_t i = 1; i < back; ++i) {
            if (!continues(lead, i, static_cast<unsigned char>(bytes[n - back + i]))) {
                return 0;
            }
        }
        return back;
    }
    return 0;
}

text_stream::text_stream(std::vector<std::string> stops) : stops_(std::move(stops)) {
    for (const auto & stop : stops_) {
        if (stop.empty()) {
            throw error(error_code::invalid_argument, "stop: an empty string can't be a stop string");
        }
    }
}

std::string text_stream::push(const std::string & bytes) {
    if (stopped()) {
        return {};
    }
    held_ += bytes;
    size_t first = std::string::npos;
    for (size_t i = 0; i < stops_.size(); ++i) {
        const size_t at = held_.find(stops_[i]);
        if (at < first) {
            first = at;
            stop_ = static_cast<int>(i);
        }
    }
    if (stopped()) {
        std::string out = held_.substr(0, first);
        held_.clear();
        return out;
    }
    size_t keep = 0;
    for (const auto & stop : stops_) {
        for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
            if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
                keep = n;
                break;
            }
        }
    }
    std::string out = held_.substr(0, held_.size() - keep);
    out.resize(out.size() - incomplete_utf8_tail(out));
    held_.erase(0, out.size());
    return out;
}

std::string text_stream::flush() {
    std::string out = std::move(held_);
    held_.clear();
    return out;
}

}  // namespace lfmfast
