// Private to the files that include llama.h.
#pragma once

#include "engine/error.h"
#include "engine/log.h"

#include <string>

namespace lfmfast {

// ggml ends the process when one of its assertions fails (a malformed file, for example). While a guard lives, an
// assertion that fails on this thread is thrown as lfmfast::error instead. Only for calls that compute nothing in
// ggml's thread pool: its other threads would wait for ever.
class abort_guard {
  public:
    explicit abort_guard(error_code code);
    ~abort_guard();
    abort_guard(const abort_guard &) = delete;
    abort_guard & operator=(const abort_guard &) = delete;

  private:
    int previous_;
};

// `what`, and the error lines that llama.cpp logged on this thread since log_clear_errors().
inline std::string with_reason(const std::string & what) {
    const std::string reason = log_last_errors();
    return reason.empty() ? what : what + ": " + reason;
}

// The variant of the CPU backend that start_backends() chose ("haswell"), or "built in" where there is but one.
std::string cpu_variant();

// Whether the CPU backend was compiled with this feature, by ggml's name for it ("AMX_INT8").
bool cpu_feature(const char * name);

// Throws model_load when `path` is plainly no GGUF file: missing, a directory, empty, unreadable, other contents.
void check_gguf_file(const std::string & path);

}  // namespace lfmfast
