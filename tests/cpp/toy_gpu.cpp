// A backend of ggml that says it is a GPU, for tests of plugins on machines without one. As far as ggml knows its buffers are
// not the host's, so everything goes in and out of them as with a GPU; what it is given is computed by the CPU backend.
// Compiled with TOY_NO_DEVICE it is one that finds no device, as ggml's CUDA backend with a driver that is too old.
#include "ggml-backend-impl.h"

#include <atomic>
#include <cstring>
#include <new>

extern "C" void ggml_log_internal(ggml_log_level level, const char * format, ...);

namespace {

constexpr std::align_val_t alignment{64};

std::atomic<int> n_computed{0};

extern ggml_backend_device device;

ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// --- memory ---

ggml_backend_buffer_type_t memory();

void * at(const ggml_tensor * tensor, size_t offset) {
    return static_cast<char *>(tensor->data) + offset;
}

bool copy(ggml_backend_buffer_t, const ggml_tensor * from, ggml_tensor * to) {
    const bool readable = ggml_backend_buffer_is_host(from->buffer) || from->buffer->buft == memory();
    if (readable) {
        memcpy(to->data, from->data, ggml_nbytes(from));
    }
    return readable;
}

const ggml_backend_buffer_i buffer_functions = {
    /* free_buffer   */ [](ggml_backend_buffer_t buffer) { operator delete(buffer->context, alignment); },
    /* get_base      */ [](ggml_backend_buffer_t buffer) { return buffer->context; },
    /* init_tensor   */ nullptr,
    /* memset_tensor */ [](ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
        memset(at(tensor, offset), value, size);
    },
    /* set_tensor    */ [](ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
        memcpy(at(tensor, offset), data, size);
    },
    /* get_tensor    */ [](ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
        memcpy(data, at(tensor, offset), size);
    },
    /* set_tensor_2d */ nullptr,
    /* get_tensor_2d */ nullptr,
    /* cpy_tensor    */ copy,
    /* clear         */ [](ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); },
    /* reset         */ nullptr,
};

const char * memory_name(ggml_backend_buffer_type_t) {
    return "Toy0";
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    void * data = operator new(size, alignment, std::nothrow);
    return data ? ggml_backend_buffer_init(type, buffer_functions, data, size) : nullptr;
}

ggml_backend_buffer_type_t memory() {
    static ggml_backend_buffer_type type = {
        {
            /* get_name         */ memory_name,
            /* alloc_buffer     */ allocate,
            /* alloc_buffer_n   */ nullptr,
            /* get_alignment    */ [](ggml_backend_buffer_type_t) { return static_cast<size_t>(alignment); },
            /* get_max_size     */ nullptr,
            /* get_alloc_size   */ nullptr,
            /* get_alloc_size_n */ nullptr,
            /* is_host          */ nullptr,
        },
        &device,
        nullptr,
    };
    return &type;
}

// --- computing ---

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    n_computed += ggml_graph_n_nodes(graph);
    return ggml_backend_graph_compute(static_cast<ggml_backend_t>(backend->context), graph);
}

ggml_guid_t guid() {
    static ggml_guid id = {'t', 'o', 'y'};
    return &id;
}

ggml_backend_t start(ggml_backend_dev_t dev, const char *) {
    ggml_backend_i functions = {};
    functions.get_name       = [](ggml_backend_t) { return "Toy"; };
    functions.free           = [](ggml_backend_t backend) {
        ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
        delete backend;
    };
    functions.graph_compute = compute;
    ggml_backend_t worker   = ggml_backend_dev_init(cpu(), nullptr);
    auto set_n_threads      = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads"));
    set_n_threads(worker, 1);
    return new ggml_backend{guid(), functions, dev, worker};
}

// --- device ---

void memory_size(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = size_t(1) << 30;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(cpu(), op);
}

// As ggml's GPUs do: large products also where the weights are the host's.
bool wants_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT && op->ne[1] >= 32;
}

ggml_backend_device device = {
    {
        /* get_name             */ [](ggml_backend_dev_t) { return "Toy0"; },
        /* get_description      */ [](ggml_backend_dev_t) { return "a toy GPU"; },
        /* get_memory           */ memory_size,
        /* get_type             */ [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; },
        /* get_props            */ [](ggml_backend_dev_t, ggml_backend_dev_props * props) {
            *props             = {};
            props->name        = "Toy0";
            props->description = "a toy GPU";
            props->type        = GGML_BACKEND_DEVICE_TYPE_GPU;
            memory_size(nullptr, &props->memory_free, &props->memory_total);
        },
        /* init_backend         */ start,
        /* get_buffer_type      */ [](ggml_backend_dev_t) { return memory(); },
        /* get_host_buffer_type */ nullptr,
        /* buffer_from_host_ptr */ nullptr,
        /* supports_op          */ supports_op,
        /* supports_buft        */ [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return type == memory(); },
        /* offload_op           */ wants_op,
        /* event_new            */ nullptr,
        /* event_free           */ nullptr,
        /* event_synchronize    */ nullptr,
    },
    nullptr,
    nullptr,
};

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = {
        GGML_BACKEND_API_VERSION,
        {
            /* get_name         */ [](ggml_backend_reg_t) { return "Toy"; },
            /* get_device_count */ [](ggml_backend_reg_t) -> size_t {
#ifdef TOY_NO_DEVICE
                ggml_log_internal(GGML_LOG_LEVEL_ERROR, "toy: the driver is too old\n");
                return 0;
#else
                return 1;
#endif
            },
            /* get_device       */ [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t { return &device; },
            /* get_proc_address */ nullptr,
        },
        nullptr,
    };
    device.reg = &reg;
    return &reg;
}

}  // namespace

extern "C" {

ggml_backend_reg_t ggml_backend_init() {
    return registry();
}

// Nodes of graphs that it computed so far.
int toy_gpu_computed() {
    return n_computed;
}

}
