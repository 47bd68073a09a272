// The least that a test program needs: count and print what does not hold, and return it from main().
#pragma once

#include "engine/error.h"

#include <cstdio>
#include <sstream>
#include <string>

namespace check {

inline int failures = 0;

inline void fail(const char * file, int line, const std::string & what) {
    ++failures;
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename A, typename B>
void equal(const A & a, const B & b, const char * text, const char * file, int line) {
    if (!(a == b)) {
        std::ostringstream out;
        out << text << ": " << a << " != " << b;
        fail(file, line, out.str());
    }
}

}  // namespace check

#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) check::equal(a, b, #a " == " #b, __FILE__, __LINE__)
// The expression throws lfmfast::error with this code.
#define CHECK_THROWS(expected, ...)                                                                                       \
    do {                                                                                                                  \
        try {                                                                                                             \
            (void) (__VA_ARGS__);                                                                                         \
            check::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw");                                               \
        } catch (const lfmfast::error & e) {                                                                              \
            if (e.code != lfmfast::error_code::expected) {                                                                \
                check::fail(__FILE__, __LINE__, std::string(#__VA_ARGS__ " threw another code: ") + e.what());            \
            }                                                                                                             \
        }                                                                                                                 \
    } while (false)
