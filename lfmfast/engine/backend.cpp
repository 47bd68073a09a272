#include "engine/backend.h"

#include "engine/model.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <vector>

#ifdef LFMFAST_BACKEND_DL
#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <dlfcn.h>
#endif
#endif

namespace fs = std::filesystem;

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

#ifdef LFMFAST_BACKEND_DL

// ggml's backends are libraries beside ours, liblfmfast-ggml-NAME.so. Those of the CPU rate themselves, and only the best is kept.
constexpr const char * file_prefix = "lfmfast-ggml-";

class library {
  public:
    explicit library(const fs::path & path) : path(path) {
#ifdef _WIN32
        handle_ = LoadLibraryW(path.c_str());
        if (!handle_) reason = "error " + std::to_string(GetLastError());
#else
        handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!handle_) reason = dlerror();
#endif
    }

    ~library() {
        if (!handle_) return;
#ifdef _WIN32
        FreeLibrary(handle_);
#else
        dlclose(handle_);
#endif
    }

    library(const library &) = delete;
    library & operator=(const library &) = delete;

    // What the function `name`, which takes nothing and returns a number, says; 0 if there is none.
    int ask(const char * name) const {
        if (!handle_) return 0;
#ifdef _WIN32
        auto function = reinterpret_cast<int (*)()>(GetProcAddress(handle_, name));
#else
        auto function = reinterpret_cast<int (*)()>(dlsym(handle_, name));
#endif
        return function ? function() : 0;
    }

    const fs::path path;
    std::string    reason;  // why it can't be opened

  private:
#ifdef _WIN32
    HMODULE handle_;
#else
    void * handle_;
#endif
};

// Where the library lies that this function is in.
fs::path own_folder() {
#ifdef _WIN32
    HMODULE handle = nullptr;
    wchar_t name[32768];
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                       reinterpret_cast<LPCWSTR>(&own_folder), &handle);
    const DWORD n = GetModuleFileNameW(handle, name, sizeof(name) / sizeof(name[0]));
    return fs::path(std::wstring(name, n)).parent_path();
#else
    Dl_info info;
    if (dladdr(reinterpret_cast<const void *>(&own_folder), &info) == 0 || !info.dli_fname) return {};
    return fs::absolute(info.dli_fname).parent_path();
#endif
}

// NAME of a backend's file, empty for other files.
std::string backend_name(const fs::path & file) {
    const std::string extension = file.extension().u8string();
    std::string       stem      = file.stem().u8string();
    if (extension != ".so" && extension != ".dll" && extension != ".dylib") return "";
    if (stem.compare(0, 3, "lib") == 0) stem.erase(0, 3);
    if (stem.compare(0, strlen(file_prefix), file_prefix) != 0) return "";
    stem.erase(0, strlen(file_prefix));
    return stem == "base" ? "" : stem;
}

std::string loaded_variant;

void load_backends() {
    const fs::path           folder = own_folder();
    std::vector<fs::path>    others;
    std::string              tried;
    std::unique_ptr<library> best;
    int                      best_score = 0;
    std::error_code          ignored;
    for (const fs::directory_entry & entry : fs::directory_iterator(folder, ignored)) {
        const std::string name = backend_name(entry.path());
        if (name.empty()) continue;
        if (name.compare(0, 3, "cpu") != 0) {
            others.push_back(entry.path());
            continue;
        }
        auto      variant = std::make_unique<library>(entry.path());
        const int score   = variant->ask("lfmfast_cpu_score");  // kernels/buffer_type.cpp
        tried += "\n  " + name + ": " + (variant->reason.empty() ? "not for this CPU" : variant->reason);
        if (score > best_score) {
            best_score     = score;
            best           = std::move(variant);
            loaded_variant = name.substr(name.find('-') + 1);
        }
    }
    for (const fs::path & path : others) ggml_backend_load(path.string().c_str());  // what can't be loaded is in the log
    if (best) ggml_backend_load(best->path.string().c_str());
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
        throw error(error_code::internal, "no library of ggml's CPU backend in " + folder.u8string() + " can be used" +
                                              (tried.empty() ? ": there is none. Install lfmfast again." : ":" + tried));
    }
}

#else

void load_backends() {
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) {
        throw error(error_code::internal, "lfmfast was built without ggml's CPU backend");
    }
}

const std::string loaded_variant = "built in";

#endif

}  // namespace

abort_guard::abort_guard(error_code code) : previous_(guarded) {
    guarded = static_cast<int>(code);
}

abort_guard::~abort_guard() {
    guarded = previous_;
}

std::string cpu_variant() {
    return loaded_variant;
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
