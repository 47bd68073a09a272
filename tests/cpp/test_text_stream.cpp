// Text that is shown: complete characters only, nothing of a stop string, nothing lost.
#include "check.h"
#include "engine/text_stream.h"

#include <random>

using lfmfast::incomplete_utf8_tail;
using lfmfast::text_stream;

namespace {

bool valid_utf8(const std::string & s) {
    for (size_t i = 0; i < s.size();) {
        const auto c = static_cast<unsigned char>(s[i]);
        const size_t n = c < 0x80 ? 1 : c >= 0xC2 && c <= 0xDF ? 2 : (c & 0xF0) == 0xE0 ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
        if (n == 0 || i + n > s.size()) return false;
        for (size_t k = 1; k < n; ++k) {
            if ((static_cast<unsigned char>(s[i + k]) & 0xC0) != 0x80) return false;
        }
        i += n;
    }
    return true;
}

void characters_stay_whole() {
    text_stream t({});
    CHECK_EQ(t.push("a\xF0\x9F"), "a");
    CHECK_EQ(t.push("\x91"), "");
    CHECK_EQ(t.push("\x8B!"), "\xF0\x9F\x91\x8B!");
    CHECK_EQ(t.push("\xE3\x81"), "");
    CHECK_EQ(t.flush(), "\xE3\x81");
    CHECK_EQ(t.flush(), "");
    // Bytes that begin no character are not waited for.
    CHECK_EQ(incomplete_utf8_tail("\x80"), 0u);
    CHECK_EQ(incomplete_utf8_tail("\xC0"), 0u);
    CHECK_EQ(incomplete_utf8_tail("\xF5\x80"), 0u);
    CHECK_EQ(incomplete_utf8_tail("\xED\xA0"), 0u);  // a surrogate
    CHECK_EQ(incomplete_utf8_tail("\xE0\x80"), 0u);  // overlong
    CHECK_EQ(incomplete_utf8_tail("\xF4\x90"), 0u);  // above U+10FFFF
    CHECK_EQ(incomplete_utf8_tail("\xF0\x9F\x91"), 3u);
    CHECK_EQ(incomplete_utf8_tail("\xE3"), 1u);
    CHECK_EQ(incomplete_utf8_tail(""), 0u);
    CHECK_EQ(incomplete_utf8_tail(std::string("\0", 1)), 0u);
}

void stop_strings_are_cut() {
    text_stream t({"</s>", "STOP"});
    CHECK_EQ(t.push("abc</"), "abc");
    CHECK_EQ(t.push("b>"), "</b>");
    CHECK_EQ(t.push("x<"), "x");
    CHECK_EQ(t.push("/s> more STOP"), "");
    CHECK(t.stopped());
    CHECK_EQ(t.stop(), "</s>");
    CHECK_EQ(t.push("later"), "");
    CHECK_EQ(t.flush(), "");

    text_stream overlap({"aab"});
    CHECK_EQ(overlap.push("aaa"), "a");
    CHECK_EQ(overlap.push("b"), "");
    CHECK(overlap.stopped());

    text_stream open({"STOP"});
    CHECK_EQ(open.push("wait STO"), "wait ");
    CHECK_EQ(open.flush(), "STO");  // it never became a stop string, so it is text

    text_stream foreign({"\xE3\x81\x82\xE3\x81\x84"});
    CHECK_EQ(foreign.push("\xE3\x81\x82\xE3\x81"), "");
    CHECK_EQ(foreign.push("\x86"), "\xE3\x81\x82\xE3\x81\x86");

    const std::string zero("a\0b", 3);
    text_stream nul({zero});
    CHECK_EQ(nul.push("xa"), "x");
    CHECK_EQ(nul.push(std::string("\0b", 2)), "");
    CHECK(nul.stopped());

    CHECK_THROWS(invalid_argument, text_stream({"ok", ""}));
}

// Random text in random pieces. What comes out is the text before a stop string, or all of it.
void random_text() {
    std::mt19937 rng(7);
    const std::vector<std::string> alphabet = {"a", "b", "<", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x91\x8B"};
    auto word = [&](size_t n) {
        std::string s;
        for (size_t i = 0; i < n; ++i) s += alphabet[rng() % alphabet.size()];
        return s;
    };
    for (int round = 0; round < 20000; ++round) {
        const std::string text = word(rng() % 12);
        std::vector<std::string> stops;
        for (size_t i = rng() % 3; i > 0; --i) stops.push_back(word(1 + rng() % 3));
        text_stream t(stops);
        std::string shown;
        for (size_t at = 0; at < text.size();) {
            const size_t n = 1 + rng() % 4;
            const std::string out = t.push(text.substr(at, n));
            CHECK(valid_utf8(out));
            shown += out;
            at += n;
        }
        bool expected = false;
        for (const auto & s : stops) {
            expected = expected || text.find(s) != std::string::npos;
            CHECK(shown.find(s) == std::string::npos);
        }
        CHECK_EQ(t.stopped(), expected);
        if (t.stopped()) {
            CHECK_EQ(text.compare(0, shown.size(), shown), 0);
            CHECK_EQ(text.compare(shown.size(), t.stop().size(), t.stop()), 0);
        } else {
            CHECK_EQ(shown + t.flush(), text);
        }
    }
}

// Any bytes: never lost, never shown twice.
void random_bytes() {
    std::mt19937 rng(8);
    for (int round = 0; round < 20000; ++round) {
        text_stream t({});
        std::string text, shown;
        for (int i = rng() % 20; i > 0; --i) {
            const std::string byte(1, static_cast<char>(rng() % 3 ? 0x80 + rng() % 0x80 : rng() % 0x100));
            text += byte;
            shown += t.push(byte);
            CHECK(text.size() - shown.size() <= 6);  // two broken characters in a row
        }
        CHECK_EQ(shown + t.flush(), text);
    }
}

}  // namespace

int main() {
    characters_stay_whole();
    stop_strings_are_cut();
    random_text();
    random_bytes();
    return check::failures != 0;
}
