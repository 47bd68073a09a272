#include "engine/backend.h"
#include "engine/model.h"

#include "ggml-backend.h"

namespace lfmfast {

std::vector<std::string> load_plugin(const std::string & path) {
    start_backends();
    log_clear_errors();
    abort_guard              guard(error_code::internal);
    const ggml_backend_reg_t reg = ggml_backend_load(path.c_str());
    if (reg == nullptr) {
        throw error(error_code::internal, with_reason("ggml can't use it"));
    }
    std::vector<std::string> devices;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); ++i) {
        devices.push_back(ggml_backend_dev_name(ggml_backend_reg_dev_get(reg, i)));
    }
    if (devices.empty()) {
        throw error(error_code::internal, with_reason("it finds no device"));
    }
    return devices;
}

}  // namespace lfmfast
