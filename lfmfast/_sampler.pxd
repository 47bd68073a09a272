# Declarations of engine/sampler.h and engine/sampler_pool.h.
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

from lfmfast._error cimport raise_error


cdef extern from "engine/sampler.h" namespace "lfmfast" nogil:
    cdef enum class sampler_stage(uint8_t):
        penalties
        dry
        top_n_sigma
        top_k
        typ_p
        top_p
        min_p
        xtc
        temperature

    cdef cppclass dry_breaker:
        int32_t head
        vector[int32_t] tail

    ctypedef shared_ptr[const vector[dry_breaker]] dry_breakers
    dry_breakers make_dry_breakers(const vector[vector[int32_t]] & sequences) except +raise_error

    cdef cppclass sampler_params:
        sampler_params()
        vector[pair[int32_t, float]] logit_bias
        int32_t penalty_last_n
        float penalty_repeat
        float penalty_freq
        float penalty_present
        int32_t top_k
        float top_p
        float min_p
        float temp
        uint32_t seed
        float dry_multiplier
        float dry_base
        int32_t dry_allowed_length
        int32_t dry_penalty_last_n
        dry_breakers dry_sequence_breakers
        vector[string] dry_breaker_texts
        float top_n_sigma
        float typ_p
        float xtc_probability
        float xtc_threshold
        float dynatemp_range
        float dynatemp_exponent
        int32_t mirostat
        float mirostat_tau
        float mirostat_eta
        int32_t min_keep
        vector[sampler_stage] stages

    cdef cppclass sampler:
        sampler(const sampler_params & params, int32_t n_vocab) except +raise_error
        int32_t sample(const float * logits) except +raise_error
        void accept(int32_t token) except +raise_error
        void reset() except +raise_error
        uint32_t seed()

    cdef cppclass token_logprob:
        int32_t token
        float logprob

    float cpp_log_probs "lfmfast::log_probs"(
        const float * logits, int32_t n_vocab, int32_t token, size_t n_top, vector[token_logprob] & top) except +raise_error


cdef extern from "engine/sampler_pool.h" namespace "lfmfast" nogil:
    cdef cppclass shared_sampler:
        shared_sampler(const sampler_params & params, int32_t n_vocab) except +raise_error
        int32_t sample(const float * logits) except +raise_error
        void accept(const vector[int32_t] & tokens) except +raise_error
        void reset() except +raise_error
        unique_ptr[shared_sampler] clone() except +raise_error
        uint32_t seed()
        uint64_t n_tied()

    cdef cppclass sampled:
        int32_t token
        string error

    vector[sampled] cpp_sample_batch "lfmfast::sample_batch"(
        const float * logits, int32_t n_vocab, const vector[shared_sampler *] & samplers, int n_threads) except +raise_error


cdef extern from "engine/simd.h" namespace "lfmfast" nogil:
    cdef cppclass simd_kernels:
        const char * name
    const simd_kernels & simd()
    vector[string] simd_available() except +raise_error
    cbool cpp_simd_use "lfmfast::simd_use"(const string & name) except +raise_error


# Writes SamplingParams (what is not set is neutral) for C++. `suppress`: tokens never to be picked (the vocabulary's own, and
# the end-of-generation tokens with ignore_eos); `breakers`: DRY's sequence breakers as token sequences.
cdef int fill_params(sampler_params & out, params, suppress=*, breakers=*) except -1
