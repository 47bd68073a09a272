#include "engine/backend.h"
#include "engine/model.h"

#include "gguf.h"

#include <algorithm>
#include <memory>

namespace lfmfast {

namespace {

template <typename T, typename Out> void copy_values(const void * data, size_t n, std::vector<Out> & out) {
    const T * values = static_cast<const T *>(data);
    out.assign(values, values + n);
}

void read_numbers(gguf_type type, const void * data, size_t n, gguf_value & value) {
    switch (type) {
        case GGUF_TYPE_UINT8:   copy_values<uint8_t>(data, n, value.integers); break;
        case GGUF_TYPE_INT8:    copy_values<int8_t>(data, n, value.integers); break;
        case GGUF_TYPE_UINT16:  copy_values<uint16_t>(data, n, value.integers); break;
        case GGUF_TYPE_INT16:   copy_values<int16_t>(data, n, value.integers); break;
        case GGUF_TYPE_UINT32:  copy_values<uint32_t>(data, n, value.integers); break;
        case GGUF_TYPE_INT32:   copy_values<int32_t>(data, n, value.integers); break;
        case GGUF_TYPE_UINT64:  copy_values<uint64_t>(data, n, value.integers); break;
        case GGUF_TYPE_INT64:   copy_values<int64_t>(data, n, value.integers); break;
        case GGUF_TYPE_BOOL:    copy_values<int8_t>(data, n, value.integers); break;
        case GGUF_TYPE_FLOAT32: copy_values<float>(data, n, value.reals); break;
        case GGUF_TYPE_FLOAT64: copy_values<double>(data, n, value.reals); break;
        default: break;
    }
}

gguf_value read_value(const gguf_context * file, int64_t id, uint64_t max_elements) {
    gguf_value value;
    value.key      = gguf_get_key(file, id);
    gguf_type type = gguf_get_kv_type(file, id);
    value.is_array = type == GGUF_TYPE_ARRAY;
    if (value.is_array) {
        type        = gguf_get_arr_type(file, id);
        value.count = gguf_get_arr_n(file, id);
    }
    value.type     = gguf_type_name(type);
    const size_t n = static_cast<size_t>(std::min<uint64_t>(value.count, value.is_array ? max_elements : 1));
    if (type == GGUF_TYPE_STRING) {
        for (size_t i = 0; i < n; ++i) {
            value.strings.emplace_back(value.is_array ? gguf_get_arr_str(file, id, i) : gguf_get_val_str(file, id));
        }
    } else if (type != GGUF_TYPE_ARRAY && n > 0) {
        read_numbers(type, value.is_array ? gguf_get_arr_data(file, id) : gguf_get_val_data(file, id), n, value);
    }
    return value;
}

gguf_tensor read_tensor(const gguf_context * file, int64_t id) {
    gguf_tensor tensor;
    tensor.name        = gguf_get_tensor_name(file, id);
    tensor.type        = ggml_type_name(gguf_get_tensor_type(file, id));
    tensor.n_bytes     = gguf_get_tensor_size(file, id);
    const int64_t * ne = gguf_get_tensor_ne(file, id);
    size_t          n  = GGML_MAX_DIMS;
    while (n > 1 && ne[n - 1] == 1) {
        --n;
    }
    tensor.shape.assign(ne, ne + n);
    return tensor;
}

}  // namespace

gguf_header read_gguf(const std::string & path, uint64_t max_elements) {
    start_backends();
    check_gguf_file(path);
    log_clear_errors();
    abort_guard guard(error_code::model_load);
    std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_from_file(path.c_str(), {/*no_alloc*/ true, nullptr}),
                                                             gguf_free);
    if (!file) {
        throw error(error_code::model_load, with_reason("can't read the header of '" + path + "'"));
    }
    gguf_header header;
    header.version = gguf_get_version(file.get());
    for (int64_t i = 0; i < gguf_get_n_kv(file.get()); ++i) {
        header.metadata.push_back(read_value(file.get(), i, max_elements));
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
        header.tensors.push_back(read_tensor(file.get(), i));
    }
    return header;
}

}  // namespace lfmfast
