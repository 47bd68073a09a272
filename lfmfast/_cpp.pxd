# Declarations of the C++ engine (engine/*.h), one block per header. The sampler's and the template's are in their own .pxd.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

from lfmfast._error cimport raise_error
from lfmfast._sampler cimport sampler_params, token_logprob


cdef extern from "engine/process.h" namespace "lfmfast" nogil:
    int current_pid() noexcept


cdef extern from "engine/log.h" namespace "lfmfast" nogil:
    cdef cppclass log_line:
        int level
        string text
    void log_set_level(int level) noexcept
    vector[log_line] log_drain() except +raise_error


cdef extern from "engine/model.h" namespace "lfmfast" nogil:
    cdef cppclass model_params:
        model_params()
        int32_t n_gpu_layers
        bool use_mmap
        bool use_mlock
        bool vocab_only
        bool check_tensors
        bool repack

    cdef cppclass model:
        const string & path()
        string description() except +raise_error
        uint64_t size()
        uint64_t n_params()
        int32_t n_ctx_train()
        int32_t n_embd()
        int32_t n_layer()
        bool on_cpu()
        bool is_hybrid()
        bool is_recurrent()
        vector[pair[string, string]] metadata() except +raise_error
        string chat_template() except +raise_error
        int32_t n_vocab()
        int32_t bos()
        int32_t eos()
        int32_t eot()
        int32_t pad()
        bool add_bos()
        bool is_eog(int32_t token) except +raise_error
        bool is_control(int32_t token) except +raise_error
        vector[pair[int32_t, string]] control_tokens() except +raise_error
        int32_t token_id(const string & text) except +raise_error
        vector[int32_t] tokenize(const string & text, bool add_special, bool parse_special) except +raise_error
        string detokenize(const vector[int32_t] & tokens, bool special) except +raise_error
        string piece(int32_t token, bool special) except +raise_error

    cdef cppclass model_loader:
        model_loader(string path, const model_params & params) except +raise_error
        bool wait(int timeout_ms) except +raise_error
        float progress()
        void cancel()
        shared_ptr[model] take() except +raise_error

    cdef cppclass gguf_value:
        string key
        string type
        bool is_array
        uint64_t count
        vector[int64_t] integers
        vector[double] reals
        vector[string] strings

    cdef cppclass gguf_tensor:
        string name
        string type
        vector[int64_t] shape
        uint64_t n_bytes

    cdef cppclass gguf_header:
        uint32_t version
        vector[gguf_value] metadata
        vector[gguf_tensor] tensors

    vector[string] named_templates() except +raise_error
    string render_named_template(
        const string & name, const vector[pair[string, string]] & messages, bool add_generation_prompt) except +raise_error
    gguf_header cpp_read_gguf "lfmfast::read_gguf"(const string & path, uint64_t max_elements) except +raise_error
    vector[pair[string, string]] cpp_build_info "lfmfast::build_info"() except +raise_error
    vector[string] cpp_load_plugin "lfmfast::load_plugin"(const string & path) except +raise_error


cdef extern from "engine/context.h" namespace "lfmfast" nogil:
    cdef cppclass context_params:
        context_params()
        int64_t n_ctx
        int64_t n_batch
        int64_t n_ubatch
        int64_t n_seq_max
        int64_t n_outputs_max
        int64_t n_rs_seq
        int64_t n_threads
        int64_t n_threads_batch
        string type_k
        string type_v
        int flash_attn
        bool kv_unified
        bool offload_kqv
        bool deterministic

    cdef cppclass batch:
        batch(int64_t n_tokens_max, int64_t n_seq_max) except +raise_error
        void add(int64_t token, int64_t pos, const vector[int64_t] & seq_ids, bool output) except +raise_error
        void clear()
        size_t size()
        size_t capacity()
        size_t n_outputs()

    cdef cppclass context:
        context(shared_ptr[model] model, const context_params & params) except +raise_error
        int64_t n_ctx()
        int64_t n_ctx_seq()
        int64_t n_batch()
        int64_t n_ubatch()
        int64_t n_seq_max()
        void decode(const batch & batch) except +raise_error
        void abort()
        size_t n_outputs()
        const float * logits() except +raise_error
        bool seq_rm(int64_t seq, int64_t p0, int64_t p1) except +raise_error
        void seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) except +raise_error
        void seq_keep(int64_t seq) except +raise_error
        int64_t seq_pos_min(int64_t seq) except +raise_error
        int64_t seq_pos_max(int64_t seq) except +raise_error
        void clear(bool data) except +raise_error
        vector[uint8_t] state_seq_get(int64_t seq, bool partial) except +raise_error
        void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) except +raise_error
        void set_n_threads(int64_t n_threads, int64_t n_threads_batch) except +raise_error

    shared_ptr[context] make_context(shared_ptr[model] model, const context_params & params) except +raise_error


cdef extern from "engine/mailbox.h" namespace "lfmfast" nogil:
    cdef cppclass mailbox:
        mailbox(int fd)
        bool wait(int timeout_ms, vector[uint64_t] & ids) except +raise_error
        void close() except +raise_error


cdef extern from "engine/guide.h" namespace "lfmfast" nogil:
    cdef cppclass token_filter:
        pass

    cdef enum class channel(uint8_t):
        content
        thought
        call
        marker

    cdef cppclass reply_format:
        int32_t thought_open
        int32_t thought_close
        int32_t call_open
        int32_t call_close
        bool in_thought

    cdef cppclass guide_params:
        reply_format format
        int64_t thought_tokens
        vector[int32_t] thought_end
        shared_ptr[token_filter] constraint
        bool lazy
        bool single_call


cdef extern from "engine/grammar.h" namespace "lfmfast" nogil:
    cdef cppclass llg_api:
        llg_api()

    cdef cppclass grammar_vocabulary:
        pass

    cdef cppclass grammar:
        pass

    shared_ptr[const grammar_vocabulary] make_grammar_vocabulary(
        const llg_api & api, const vector[string] & data, const vector[bool] & control, const vector[int32_t] & ends
    ) except +raise_error
    shared_ptr[grammar] make_grammar(
        const shared_ptr[const grammar_vocabulary] & vocab, const string & kind, const string & text) except +raise_error
    shared_ptr[token_filter] copy_grammar(const shared_ptr[grammar] & grammar) except +raise_error


cdef extern from "engine/stream.h" namespace "lfmfast" nogil:
    cdef cppclass request:
        request()
        vector[int32_t] prompt
        sampler_params sampling
        int64_t max_tokens
        vector[string] stops
        int64_t n_logprobs
        bool cache_prompt
        bool pin
        int64_t n_cache_reuse
        int32_t priority
        int64_t max_prompt_ms
        int64_t max_predict_ms
        guide_params guide
        shared_ptr[mailbox] inbox
        uint64_t inbox_id

    cdef cppclass token_info:
        int32_t token
        float logprob
        vector[token_logprob] top

    cdef cppclass piece:
        string text
        channel kind
        vector[token_info] tokens
        int64_t ready_us

    cdef enum class finish_reason(int):
        none
        stop
        length
        cancelled
        failed

    cdef cppclass timings:
        int64_t n_prompt
        int64_t n_cached
        int64_t n_predicted
        int64_t wait_us
        int64_t prompt_us
        int64_t predict_us
        int64_t decode_us
        int64_t sample_us
        int64_t text_us
        int64_t emit_us
        vector[int32_t] outside_us

    cdef cppclass stream:
        bool wait(int timeout_ms, vector[piece] & out) except +raise_error
        void cancel()
        finish_reason reason()
        const string & stop_string()
        const timings & times()
        int64_t n_read()


cdef extern from "engine/make_engine.h" namespace "lfmfast" nogil:
    cdef cppclass engine_params:
        engine_params()
        int64_t n_parallel
        int64_t n_parallel_max
        int64_t growth_bytes
        int64_t n_queue_max
        int64_t cache_bytes
        int64_t max_stall_ms
        int64_t checkpoint_tokens
        int64_t faults_every
        int64_t faults_seed
        int64_t n_threads
        int64_t n_threads_batch

    cdef struct engine_stats:
        int64_t n_slots
        int64_t n_running
        int64_t n_queued
        int64_t n_requests
        int64_t n_prompt
        int64_t n_cached
        int64_t n_predicted
        int64_t n_prompt_passes
        int64_t n_steps
        int64_t n_failed_passes
        int64_t prompt_us
        int64_t step_us
        int64_t sample_us
        int64_t n_saved
        int64_t n_loaded
        int64_t n_moved
        int64_t n_unsaved
        int64_t copy_us
        int64_t cache_bytes
        int64_t cache_nodes
        int64_t n_evicted
        int64_t n_ubatch
        int64_t n_halved_passes

    cdef cppclass saved_point "lfmfast::saved_prefix::point":
        saved_point()
        size_t n_tokens
        vector[uint8_t] checkpoint

    cdef cppclass saved_prefix:
        saved_prefix()
        vector[int32_t] tokens
        vector[uint8_t] layout
        vector[uint8_t] rows
        vector[saved_point] points
        vector[float] logits

    cdef cppclass engine:
        shared_ptr[stream] submit(request r) except +raise_error
        void close()
        void forget() except +raise_error
        bool unpin(const vector[int32_t] & prompt) except +raise_error
        saved_prefix save(const vector[int32_t] & tokens) except +raise_error
        void load(const saved_prefix & saved, bool pin) except +raise_error
        engine_stats stats() except +raise_error
        int64_t n_ctx()

    shared_ptr[engine] make_engine(shared_ptr[model] model, const context_params & context,
                                   engine_params params) except +raise_error
