# cython: language_level=3
"""The engine: submit a request, wait for its pieces, cancel."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from lfmfast cimport _cpp as cpp
from lfmfast._model cimport Model, check_pid, to_utf8
from lfmfast._sampler cimport fill_params

from lfmfast._model import forward_logs
from lfmfast.errors import ClosedError

_REASONS = ("", "stop", "length", "cancelled", "failed")  # in the order of lfmfast::finish_reason


cdef class Stream:
    """The answer to one request. Made by :meth:`Engine.submit`; for one consumer."""
    cdef shared_ptr[cpp.stream] _stream
    cdef int _pid
    cdef bint _logprobs
    cdef readonly bint done

    def wait(self):
        """Wait for pieces, at most 50 ms; other threads and signal handlers run meanwhile.

        Returns
        -------
        list of (bytes, tuple of int, tuple or None, int)
            Text, its tokens, per token (logprob, ((token, logprob), ...)) if that was asked for, and when the engine handed
            it over (microseconds of the monotonic clock).
        """
        check_pid(self._pid, "stream")
        cdef vector[cpp.piece] pieces
        cdef cbool done = False
        with nogil:
            done = self._stream.get().wait(50, pieces)
        PyErr_CheckSignals()
        self.done = done
        cdef size_t i, j
        cdef cpp.piece * p
        out = []
        for i in range(pieces.size()):
            p = &pieces[i]
            tokens = tuple([p.tokens[j].token for j in range(p.tokens.size())])
            logprobs = None
            if self._logprobs:
                logprobs = tuple([(p.tokens[j].logprob, tuple([(t.token, t.logprob) for t in p.tokens[j].top]))
                                  for j in range(p.tokens.size())])
            out.append((<bytes>p.text, tokens, logprobs, p.ready_us))
        return out

    cdef cpp.stream * made(self) except NULL:
        if not self._stream:
            raise TypeError("a Stream is made by Engine.submit()")
        return self._stream.get()

    def cancel(self):
        """Ask the engine to stop; the end still comes through :meth:`wait`. From any thread."""
        self.made().cancel()

    @property
    def finish_reason(self):
        return _REASONS[<int>self.made().reason()]

    @property
    def stop_string(self):
        return self.made().stop_string().decode("utf-8", "replace") or None

    @property
    def timings(self):
        """Counters of lfmfast::timings; valid when `done`."""
        cdef const cpp.timings * t = &self.made().times()
        return {"n_prompt": t.n_prompt, "n_cached": t.n_cached, "n_predicted": t.n_predicted, "wait_us": t.wait_us,
                "prompt_us": t.prompt_us, "predict_us": t.predict_us, "decode_us": t.decode_us, "sample_us": t.sample_us,
                "text_us": t.text_us, "emit_us": t.emit_us}

    @property
    def outside_us(self):
        """Of each token but the last, the microseconds that were not llama_decode; empty until `done`."""
        cdef cpp.stream * stream = self.made()
        return list(stream.times().outside_us) if self.done else []  # before, the engine's thread appends to it

    def __dealloc__(self):
        if self._stream and not self.done:
            self._stream.get().cancel()


cdef class Engine:
    """Owns a context on a model, and the thread that answers requests with it. Safe to use from several threads."""
    cdef shared_ptr[cpp.engine] _engine
    cdef int _pid
    cdef object __weakref__

    def __cinit__(self, Model model not None, *, int64_t n_ctx, int64_t n_batch, int64_t n_ubatch, int64_t n_threads,
                  int64_t n_threads_batch, str type_k, str type_v, flash_attn, bint offload_kqv):
        cdef cpp.context_params params
        self._pid = cpp.current_pid()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_outputs_max = 1
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        params.type_k = type_k.encode()
        params.type_v = type_v.encode()
        params.flash_attn = -1 if flash_attn is None else int(bool(flash_attn))
        params.offload_kqv = offload_kqv
        cdef shared_ptr[cpp.model] shared = model.alive()
        try:
            with nogil:
                self._engine = cpp.make_engine(shared, params)
        finally:
            forward_logs()

    cdef shared_ptr[cpp.engine] alive(self) except *:
        check_pid(self._pid, "model")
        if not self._engine:
            raise ClosedError("the model was closed")
        return self._engine

    def submit(self, prompt, sampling, *, suppress=(), int64_t max_tokens=-1, stop=(), int64_t n_logprobs=-1,
               bint cache_prompt=True):
        """Queue a request.

        Parameters
        ----------
        prompt : sequence of int
            Token ids.
        sampling : SamplingParams
            Resolved parameters.
        suppress : sequence of int
            Tokens that are never picked.
        max_tokens : int
            -1: no limit.
        stop : sequence of str
            Strings that end the answer.
        n_logprobs : int
            -1: none; n: log probabilities of the token and of the n most likely ones.

        Raises
        ------
        ContextFullError
            The prompt has more tokens than the context.
        """
        cdef shared_ptr[cpp.engine] engine = self.alive()
        cdef cpp.request request
        request.prompt = prompt
        fill_params(request.sampling, sampling, suppress)
        request.max_tokens = max_tokens
        for text in stop:
            request.stops.push_back(to_utf8(text, "stop"))
        request.n_logprobs = n_logprobs
        request.cache_prompt = cache_prompt
        cdef Stream stream = Stream.__new__(Stream)
        stream._pid = self._pid
        stream._logprobs = n_logprobs >= 0
        with nogil:
            stream._stream = engine.get().submit(move(request))
        return stream

    def forget(self):
        """Drop what is kept of past prompts, when the running request has ended."""
        self.alive().get().forget()

    @property
    def n_ctx(self):
        return self.alive().get().n_ctx()

    @property
    def closed(self):
        return not self._engine

    def close(self):
        """Cancel all requests, end the thread, free the context. May be called twice."""
        check_pid(self._pid, "model")
        cdef shared_ptr[cpp.engine] last = self._engine
        self._engine.reset()
        if last:
            with nogil:
                last.get().close()
                last.reset()
            forward_logs()

    def __dealloc__(self):
        cdef shared_ptr[cpp.engine] * _leaked
        if self._pid != cpp.current_pid():
            _leaked = new shared_ptr[cpp.engine](self._engine)
            return
        with nogil:
            self._engine.reset()
