#include "engine/exact.h"

#include "ggml-backend.h"

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace lfmfast {

namespace {

// Of the library that a function is in, another function.
void * beside(void * function, const char * name) {
#ifdef _WIN32
    HMODULE library = nullptr;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                       static_cast<LPCWSTR>(function), &library);
    return library == nullptr ? nullptr : reinterpret_cast<void *>(GetProcAddress(library, name));
#else
    Dl_info info;
    void *  library = dladdr(function, &info) == 0 ? nullptr : dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return nullptr;
    }
    void * found = dlsym(library, name);
    dlclose(library);  // it stays loaded: the backend is in use
    return found;
#endif
}

}  // namespace

bool set_exact(ggml_threadpool * pool, bool on) {
    ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    void * known = ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
    auto   set   = reinterpret_cast<int (*)(ggml_threadpool *, int)>(beside(known, "lfmfast_set_exact"));
    return set != nullptr && set(pool, on ? 1 : 0) != 0;
}

}  // namespace lfmfast
