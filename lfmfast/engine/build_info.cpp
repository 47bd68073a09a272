#include "engine/backend.h"
#include "engine/model.h"

#include "ggml-backend.h"
#include "llama.h"

#include <memory>

#ifndef LFMFAST_LLAMA_BUILD
#error "CMakeLists.txt defines LFMFAST_*"
#endif

namespace lfmfast {

namespace {

const std::string kernel_prefix = "LFMFAST_";

// Flags that the CPU backend in use was compiled with. LFMFAST_CPU_FLAGS is "|NAME FLAGS|NAME FLAGS|", a part for each variant,
// or only "FLAGS".
std::string cpu_flags() {
    const std::string flags = LFMFAST_CPU_FLAGS, name = "|" + cpu_variant() + " ";
    if (flags.compare(0, 1, "|") != 0) return flags;
    const size_t at = flags.find(name);
    if (at == std::string::npos) return "";
    return flags.substr(at + name.size(), flags.find('|', at + 1) - at - name.size());
}

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

// The type of buffer of our matrix products (kernels/buffer_type.cpp), null where they are switched off or there are none.
ggml_backend_buffer_type_t kernel_buffers() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(cpu);
    auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * type = get ? get(cpu) : nullptr; type != nullptr && *type != nullptr; ++type) {
        if (std::string(ggml_backend_buft_name(*type)).compare(0, kernel_prefix.size(), kernel_prefix) == 0) return *type;
    }
    return nullptr;
}

// The instruction set that they use: the rest of the name.
std::string kernel_set() {
    ggml_backend_buffer_type_t type = kernel_buffers();
    return type ? std::string(ggml_backend_buft_name(type)).substr(kernel_prefix.size()) : "none";
}

// The types of weights that they multiply, as their buffers answer a model's loader.
std::string kernel_types() {
    ggml_backend_buffer_type_t type = kernel_buffers();
    if (!type) return "";
    ggml_init_params params = {1 << 20, nullptr, true};
    std::unique_ptr<ggml_context, decltype(&ggml_free)>                   context(ggml_init(params), ggml_free);
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(ggml_backend_buft_alloc_buffer(type, 0),
                                                                                     ggml_backend_buffer_free);
    std::string names;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto kind = static_cast<ggml_type>(i);
        if (ggml_blck_size(kind) <= 1) continue;  // not quantised, or not in use
        ggml_tensor * weights = ggml_new_tensor_2d(context.get(), kind, 1024, 32);
        ggml_tensor * product = ggml_mul_mat(context.get(), weights, ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 1024, 1));
        weights->buffer = buffer.get();
        if (ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), product)) {
            names += (names.empty() ? "" : " ") + std::string(ggml_type_name(kind));
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
        {"cpu_variant", cpu_variant()},
        {"cpu_flags", cpu_flags()},
        {"cpu_features_compiled", compiled_features()},
        {"cpu_features_found", found_features()},
        {"kernels", kernel_set()},
        {"kernel_types", kernel_types()},
    };
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        info.emplace_back("device", std::string(ggml_backend_dev_name(dev)) + ": " + ggml_backend_dev_description(dev));
    }
    return info;
}

}  // namespace lfmfast
