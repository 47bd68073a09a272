#include "engine/backend.h"

#include "engine/model.h"

#include "ggml-backend.h"
#include "llama.h"

#include <mutex>

#if defined(LFMFAST_BACKEND_DL) && !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace lfmfast {

namespace {

thread_local int guarded = -1;  // error_code of the innermost guard of this thread; -1: none

void on_abort(const char * message) {
    if (guarded >= 0) {
        throw error(static_cast<error_code>(guarded), with_reason(std::string("llama.cpp: ") + message));
    }
    fprintf(stderr, "%s\n", message);
}

void on_log(ggml_log_level level, const char * text, void *) {
    constexpr int python_levels[] = {20, 10, 20, 30, 40, 20};  // none, debug, info, warn, error, cont
    const int     python          = python_levels[level >= 0 && level <= GGML_LOG_LEVEL_CONT ? level : 0];
    log_message(python, level == GGML_LOG_LEVEL_CONT, text);
}

void load_backends() {
#if defined(LFMFAST_BACKEND_DL) && !defined(_WIN32)
    Dl_info info;
    if (dladdr(reinterpret_cast<const void *>(&start_backends), &info) != 0 && info.dli_fname != nullptr) {
        const std::string file = info.dli_fname;
        ggml_backend_load_all_from_path(file.substr(0, file.rfind('/')).c_str());
    }
#endif
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
        throw error(error_code::internal, "no CPU backend of ggml could be loaded from the package's folder");
    }
}

}  // namespace

abort_guard::abort_guard(error_code code) : previous_(guarded) {
    guarded = static_cast<int>(code);
}

abort_guard::~abort_guard() {
    guarded = previous_;
}

void start_backends() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_log_set(on_log, nullptr);
        ggml_set_abort_callback(on_abort);
        llama_backend_init();
        load_backends();
    });
}

}  // namespace lfmfast
