#include "engine/backend.h"
#include "engine/model.h"

#include "ggml-backend.h"
#include "llama.h"

#ifndef LFMFAST_LLAMA_BUILD
#error "CMakeLists.txt defines LFMFAST_*"
#endif

namespace lfmfast {

namespace {

// What the CPU backend was compiled with, in ggml's own names.
std::string compiled_features() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu);
    auto get = reinterpret_cast<ggml_backend_get_features_t>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features"));
    std::string names;
    for (ggml_backend_feature * f = get ? get(reg) : nullptr; f != nullptr && f->name != nullptr; ++f) {
        if (std::string(f->value) != "0") {
            names += (names.empty() ? "" : " ") + std::string(f->name) + (std::string(f->value) == "1" ? "" : std::string("=") + f->value);
        }
    }
    return names;
}

// What this machine's CPU offers, of the features that make a difference here.
std::string found_features() {
    std::string names;
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    const auto add = [&](const char * name, bool has) {
        if (has) {
            names += (names.empty() ? "" : " ") + std::string(name);
        }
    };
    __builtin_cpu_init();
    add("SSE4_2", __builtin_cpu_supports("sse4.2"));
    add("AVX", __builtin_cpu_supports("avx"));
    add("AVX2", __builtin_cpu_supports("avx2"));
    add("FMA", __builtin_cpu_supports("fma"));
    add("BMI2", __builtin_cpu_supports("bmi2"));
    add("AVX512F", __builtin_cpu_supports("avx512f"));
    add("AVX512BW", __builtin_cpu_supports("avx512bw"));
    add("AVX512VBMI", __builtin_cpu_supports("avx512vbmi"));
    add("AVX512VNNI", __builtin_cpu_supports("avx512vnni"));
#endif
    return names;
}

}  // namespace

bool cpu_feature(const char * name) {
    return (" " + compiled_features() + " ").find(" " + std::string(name) + " ") != std::string::npos;
}

std::vector<std::pair<std::string, std::string>> build_info() {
    start_backends();
    std::vector<std::pair<std::string, std::string>> info = {
        {"llama_cpp", LFMFAST_LLAMA_BUILD},
        {"compiler", LFMFAST_COMPILER},
        {"build_type", LFMFAST_BUILD_TYPE},
        {"cpu_flags", LFMFAST_CPU_FLAGS},
        {"cpu_features_compiled", compiled_features()},
        {"cpu_features_found", found_features()},
    };
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        info.emplace_back("device", std::string(ggml_backend_dev_name(dev)) + ": " + ggml_backend_dev_description(dev));
    }
    return info;
}

}  // namespace lfmfast
