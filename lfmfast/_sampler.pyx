# cython: language_level=3, freethreading_compatible=True
"""The sampler chain: picks the next token from a row of logits."""

import os
import sys

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t
from libcpp.memory cimport unique_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from lfmfast.errors import ParameterError, SamplingError
from lfmfast.params import NEUTRAL, SamplingParams
from lfmfast.params import SAMPLERS as _SAMPLERS

_LITTLE_ENDIAN = sys.byteorder == "little"


cdef int fill_params(sampler_params & out, params, suppress=(), breakers=()) except -1:
    params = params.resolved()
    cdef vector[vector[int32_t]] sequences
    out.logit_bias.clear()
    for token, bias in params.logit_bias.items():
        out.logit_bias.push_back(pair[int32_t, float](<int32_t>token, <float>bias))
    for token in suppress:
        out.logit_bias.push_back(pair[int32_t, float](<int32_t>token, <float>float("-inf")))
    out.penalty_last_n = params.repeat_last_n
    out.penalty_repeat = params.repeat_penalty
    out.penalty_freq = params.frequency_penalty
    out.penalty_present = params.presence_penalty
    out.top_k = max(params.top_k, 0)
    out.top_p = params.top_p
    out.min_p = params.min_p
    out.temp = params.temperature
    out.seed = params.seed & 0xFFFFFFFF  # -1 is llama.cpp's LLAMA_DEFAULT_SEED
    out.dry_multiplier = params.dry_multiplier
    out.dry_base = params.dry_base
    out.dry_allowed_length = params.dry_allowed_length
    out.dry_penalty_last_n = params.dry_penalty_last_n
    out.dry_breaker_texts.clear()
    for text in params.dry_sequence_breakers:
        out.dry_breaker_texts.push_back(text.encode("utf-8", "surrogateescape"))
    if breakers:
        for sequence in breakers:
            sequences.push_back(sequence)
        out.dry_sequence_breakers = make_dry_breakers(sequences)
    out.top_n_sigma = params.top_n_sigma
    out.typ_p = params.typical_p
    out.xtc_probability = params.xtc_probability
    out.xtc_threshold = params.xtc_threshold
    out.dynatemp_range = params.dynatemp_range
    out.dynatemp_exponent = params.dynatemp_exponent
    out.mirostat = params.mirostat
    out.mirostat_tau = params.mirostat_tau
    out.mirostat_eta = params.mirostat_eta
    out.min_keep = params.min_keep
    out.stages.clear()
    for name in params.samplers:
        out.stages.push_back(<sampler_stage><int>_SAMPLERS.index(name))  # same order as sampler_stage
    return 0


cdef class _Rows:
    """Float32 rows of `n_vocab` logits, borrowed from a buffer for the length of a call."""
    cdef Py_buffer view
    cdef bint held
    cdef const float * data
    cdef Py_ssize_t n_rows

    def __cinit__(self, logits, int n_dims, int32_t n_vocab):
        try:
            PyObject_GetBuffer(logits, &self.view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
        except (TypeError, ValueError, BufferError) as problem:
            raise ParameterError(
                f"logits must be a C-contiguous float32 buffer, not {type(logits).__name__}: {problem}") from None
        self.held = True
        kind = self.view.format.decode("ascii", "replace") if self.view.format is not NULL else "B"
        shape = tuple(self.view.shape[i] for i in range(self.view.ndim))
        if kind.lstrip("@=<" if _LITTLE_ENDIAN else "@=>!") != "f":
            raise ParameterError(f"logits must be float32, not of buffer format {kind!r}")
        if len(shape) != n_dims or shape[n_dims - 1] != n_vocab:
            want = f"({n_vocab},)" if n_dims == 1 else f"(rows, {n_vocab})"
            raise ParameterError(f"logits must have the shape {want}, not {shape}")
        self.data = <const float *>self.view.buf
        self.n_rows = 1 if n_dims == 1 else shape[0]

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef class SamplerChain:
    """llama.cpp's sampler chain: logit bias, penalties, truncation, temperature, a draw.

    The same logits, parameters and seed give the same tokens as llama.cpp's own chain, exact ties included. Three things differ
    on purpose: a row that can't be sampled (NaN, +inf, nothing above -inf) is an error and not some token; where a dynamic
    temperature gets so near to 0 that the logits overflow, the most probable token is taken and not the last one; and in an
    order of stages of one's own no stage may come twice. Several threads may use one chain; they take turns.

    Parameters
    ----------
    n_vocab : int
        Logits per row.
    params : SamplingParams, optional
        What it does not set is neutral (off).
    dry_breakers : sequence of sequences of int, optional
        DRY's sequence breakers as token ids (`dry_sequence_breakers` of `params` are strings, and a chain has no vocabulary).
    **overrides
        Fields of SamplingParams that replace those of `params`.

    Raises
    ------
    ParameterError
        For a value outside its limits.

    Examples
    --------
    >>> import numpy as np
    >>> chain = SamplerChain(4, temperature=0)
    >>> chain.sample(np.array([0.1, 3.0, -1.0, 2.0], dtype=np.float32))
    1
    """
    cdef unique_ptr[shared_sampler] _chain
    cdef readonly int n_vocab
    cdef readonly object params

    def __init__(self, n_vocab, params=None, *, dry_breakers=(), **overrides):
        if params is not None and not isinstance(params, SamplingParams):
            raise ParameterError(f"params must be SamplingParams, not {type(params).__name__}")
        if isinstance(n_vocab, bool) or not isinstance(n_vocab, int) or not 0 < n_vocab < 2**31:
            raise ParameterError(f"n_vocab must be an integer from 1 to 2147483647, not {n_vocab!r}")
        resolved = NEUTRAL.merged(params, **overrides)
        cdef sampler_params native
        fill_params(native, resolved, (), _sequences(dry_breakers, n_vocab))
        cdef int32_t n = n_vocab
        cdef unique_ptr[shared_sampler] chain
        chain.reset(new shared_sampler(native, n))
        with cython.critical_section(self):
            if self._chain.get() is not NULL:  # another thread may be sampling with it
                raise ParameterError("a SamplerChain can't be initialised twice: make another one")
            self.n_vocab = n
            self.params = resolved
            self._chain = move(chain)

    cdef shared_sampler * native(self) except NULL:
        if self._chain.get() is NULL:
            raise ParameterError("this SamplerChain was made without its __init__")
        return self._chain.get()

    def sample(self, logits):
        """The next token for a row of logits. Does not accept it.

        Parameters
        ----------
        logits : float32 buffer of shape (n_vocab,)
            Left as it is.

        Returns
        -------
        int
            A token id.

        Raises
        ------
        SamplingError
            If the row has a NaN or +inf, or no token above -inf.
        """
        cdef shared_sampler * chain = self.native()
        cdef _Rows rows = _Rows(logits, 1, self.n_vocab)
        cdef int32_t token
        with nogil:
            token = chain.sample(rows.data)
        return token

    def accept(self, tokens):
        """Put a token, or a sequence of them, of the prompt or the output into the windows of the penalties and DRY."""
        cdef shared_sampler * chain = self.native()
        cdef vector[int32_t] ids = _tokens(tokens if hasattr(tokens, "__iter__") else (tokens,), self.n_vocab)
        with nogil:
            chain.accept(ids)

    def reset(self):
        """Empty the windows and seed the random numbers anew."""
        cdef shared_sampler * chain = self.native()
        with nogil:
            chain.reset()

    def clone(self):
        """An independent chain in the same state: same windows, same random numbers to come."""
        cdef shared_sampler * chain = self.native()
        cdef SamplerChain other = SamplerChain.__new__(SamplerChain)
        other._chain = chain.clone()
        other.n_vocab = self.n_vocab
        other.params = self.params
        return other

    @staticmethod
    def sample_batch(logits, chains, *, n_threads=None):
        """The next token of each row, with one chain per row, on several threads.

        Parameters
        ----------
        logits : float32 buffer of shape (n, n_vocab)
        chains : sequence of n SamplerChain, all different
        n_threads : int, optional
            At most so many at once; by default up to four. The tokens do not depend on it.

        Returns
        -------
        list of int

        Raises
        ------
        SamplingError
            If a row can't be sampled; the message says which. The other rows' chains have moved on.

        Examples
        --------
        >>> import numpy as np
        >>> SamplerChain.sample_batch(np.eye(3, dtype=np.float32), [SamplerChain(3, temperature=0) for _ in range(3)])
        [0, 1, 2]
        """
        cdef vector[shared_sampler *] native
        cdef vector[sampled] out
        keep = list(chains)
        for chain in keep:
            if not isinstance(chain, SamplerChain):
                raise ParameterError(f"chains must be SamplerChain objects, not {type(chain).__name__}")
            native.push_back((<SamplerChain>chain).native())
        if not keep:
            return []
        cdef int32_t n_vocab = keep[0].n_vocab
        cdef _Rows rows = _Rows(logits, 2, n_vocab)
        if rows.n_rows != len(keep):
            raise ParameterError(f"logits must have a row for each of the {len(keep)} chains, not {rows.n_rows}")
        if n_threads is None:
            n_threads = min(4, os.cpu_count() or 1)
        elif isinstance(n_threads, bool) or not isinstance(n_threads, int) or not 1 <= n_threads <= 1024:
            raise ParameterError(f"n_threads must be an integer from 1 to 1024, not {n_threads!r}")
        cdef int threads = n_threads
        with nogil:
            out = cpp_sample_batch(rows.data, n_vocab, native, threads)
        for i in range(len(keep)):
            if not out[i].error.empty():
                raise SamplingError(f"row {i}: {out[i].error.decode('utf-8', 'replace')}")
        return [out[i].token for i in range(len(keep))]

    @property
    def seed(self):
        """The seed in use; where none was given, the one that was drawn."""
        return self.native().seed()

    @property
    def n_tied(self):
        """Rows that took the slower exact path because logits were equal where that decides the order."""
        return self.native().n_tied()

    def __repr__(self):
        shown = {k: v for k, v in self.params.as_dict().items() if v != getattr(NEUTRAL, k)}
        shown["seed"] = self.seed
        return f"SamplerChain({self.n_vocab}, {', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __copy__(self):
        return self.clone()

    def __deepcopy__(self, memo):
        return self.clone()


cdef vector[int32_t] _tokens(tokens, int32_t n_vocab) except *:
    cdef vector[int32_t] out
    for token in tokens:
        try:
            token = token.__index__()
        except AttributeError:
            raise ParameterError(f"a token must be an integer, not {token!r}") from None
        if not 0 <= token < n_vocab:
            raise ParameterError(f"a token must be from 0 to {n_vocab - 1}, not {token}")
        out.push_back(token)
    return out


def _sequences(breakers, n_vocab):
    return [_tokens(sequence, n_vocab) for sequence in breakers]


def log_probs(logits, token, n_top=0):
    """Natural logarithms of the probabilities of a token and of the most probable ones, from raw logits.

    Parameters
    ----------
    logits : float32 buffer of shape (n_vocab,)
    token : int
    n_top : int
        How many of the most probable tokens to return.

    Returns
    -------
    logprob : float
        Of `token`.
    top : list of (int, float)
        Token ids and logprobs, descending; equal ones by ascending id.

    Examples
    --------
    >>> import numpy as np
    >>> logprob, top = log_probs(np.zeros(4, dtype=np.float32), 2, n_top=1)
    >>> round(logprob, 4), top[0][0]
    (-1.3863, 0)
    """
    try:
        size = len(logits)
    except TypeError:
        raise ParameterError(f"logits must be a float32 buffer, not {type(logits).__name__}") from None
    if isinstance(n_top, bool) or not isinstance(n_top, int) or n_top < 0:
        raise ParameterError(f"n_top must be an integer 0 or more, not {n_top!r}")
    cdef _Rows rows = _Rows(logits, 1, size)
    cdef int32_t n_vocab = size, id = _tokens((token,), size)[0]
    cdef size_t n = min(n_top, size)
    cdef vector[token_logprob] top
    cdef float logprob
    with nogil:
        logprob = cpp_log_probs(rows.data, n_vocab, id, n, top)
    return logprob, [(t.token, t.logprob) for t in top]


def simd_variants():
    """Names of the instruction sets that this CPU has code for, best first."""
    return [name.decode() for name in simd_available()]


def use_simd(name=None):
    """Let the samplers of this process use another instruction set (for tests and benchmarks); returns the one in use."""
    if name is not None and not cpp_simd_use(name.encode()):
        raise ParameterError(f"name must be one of {simd_variants()}, not {name!r}")
    return simd().name.decode()
