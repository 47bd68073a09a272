// The one kind of exception that leaves the C++ engine. The Cython side maps `code` to a Python class (_error.pyx).
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace lfmfast {

enum class error_code : int {
    internal = 0,      // a fault of lfmfast
    invalid_argument,  // a value outside its limits; the message names value and limit
    model_load,        // a model file that can't be used; the message ends with llama.cpp's reason
    context_full,      // `seen` tokens do not fit in `limit`
    decode,            // llama_decode failed
    closed,            // the object was closed
    busy,              // another thread is using the object
    forked,            // the object belongs to the parent process
    state,             // a saved state that can't be restored
    chat_template,     // messages that the template can't render
    out_of_memory,
    cancelled,
    sampling,          // logits that can't be sampled: NaN, or nothing above -inf
    queue_full,        // `limit` requests wait already
    deadline,          // a request's time was over before it gave anything
    constraint,        // a grammar that can't be followed any further
};

struct error : std::runtime_error {
    error_code code;
    int64_t    seen;   // what was asked for, where the error is about a number
    int64_t    limit;

    error(error_code code, const std::string & message, int64_t seen = 0, int64_t limit = 0)
        : std::runtime_error(message), code(code), seen(seen), limit(limit) {}
};

// What the exception in flight says; to be called in a catch block. Any other C++ exception counts as internal.
struct error_info {
    int         code = 0;
    std::string message;
    int64_t     seen  = 0;
    int64_t     limit = 0;
};

inline error_info current_error() noexcept {
    error_info info;
    try {
        try {
            throw;
        } catch (const error & e) {
            info = {static_cast<int>(e.code), e.what(), e.seen, e.limit};
        } catch (const std::bad_alloc &) {
            info = {static_cast<int>(error_code::out_of_memory), "out of memory", 0, 0};
        } catch (const std::exception & e) {
            info = {static_cast<int>(error_code::internal), e.what(), 0, 0};
        } catch (...) {
            info.message = "unknown C++ exception";
        }
    } catch (...) {  // no memory even for the message
        info.code = static_cast<int>(error_code::out_of_memory);
    }
    return info;
}

// The same as an exception of ours, to be kept or given to who waits.
inline error caught_error() {
    const error_info info = current_error();
    return error(static_cast<error_code>(info.code), info.message, info.seen, info.limit);
}

}  // namespace lfmfast
