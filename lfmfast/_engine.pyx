# cython: language_level=3, freethreading_compatible=True
"""The engine: submit requests, wait for their pieces, cancel."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from lfmfast cimport _cpp as cpp
from lfmfast._grammar cimport Grammar
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
        list of (bytes, tuple of int, tuple or None, int, int)
            Text, its tokens, per token (logprob, ((token, logprob), ...)) if that was asked for, what it belongs to
            (`lfmfast.reply.CONTENT`, ...), and when the engine handed it over (microseconds of the monotonic clock).
        """
        check_pid(self._pid, "stream")
        cdef vector[cpp.piece] pieces
        cdef cbool done = False
        with nogil:
            done = self._stream.get().wait(50, pieces)
        PyErr_CheckSignals()
        if done:
            self.done = True
        return self.listed(pieces)

    def poll(self):
        """What :meth:`wait` gives, without waiting: for a consumer that a :class:`Mailbox` tells of news."""
        check_pid(self._pid, "stream")
        cdef vector[cpp.piece] pieces
        if self._stream.get().wait(0, pieces):
            self.done = True
        return self.listed(pieces)

    cdef list listed(self, vector[cpp.piece] & pieces):
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
            out.append((<bytes>p.text, tokens, logprobs, <int>p.kind, p.ready_us))
        return out

    cdef cpp.stream * made(self) except NULL:
        if not self._stream:
            raise TypeError("a Stream is made by Engine.submit()")
        return self._stream.get()

    def cancel(self):
        """Ask the engine to stop; the end still comes through :meth:`wait`. From any thread."""
        self.made().cancel()

    @property
    def n_read(self):
        """Tokens of the prompt that are read so far, the kept ones included; -1: the request waits."""
        return self.made().n_read()

    @property
    def n_cached(self):
        """Tokens of the prompt that were kept of others; valid when `n_read` is not -1."""
        return self.made().times().n_cached

    @property
    def prompt_us(self):
        """How long reading the prompt took; valid from the first item on."""
        return self.made().times().prompt_us

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


cdef bytes to_bytes(const vector[uint8_t] & data):
    return (<const char *>data.data())[:data.size()]


cdef void fill_bytes(vector[uint8_t] & out, bytes data) except *:
    out.resize(len(data))
    memcpy(out.data(), <const char *>data, len(data))


cdef class Mailbox:
    """Tells which of several streams have news, with one wake-up for all of them.

    Parameters
    ----------
    fd : int
        A descriptor that 8 bytes are written to when the first news come in, for an event loop to watch; -1: none. It must
        stay open until :meth:`close`.
    """
    cdef shared_ptr[cpp.mailbox] _mailbox

    def __cinit__(self, int fd=-1):
        self._mailbox.reset(new cpp.mailbox(fd))

    def wait(self, int timeout_ms):
        """Ids (as given to :meth:`Engine.submit`) of streams with news, each once; None when it was closed."""
        cdef vector[uint64_t] ids
        cdef cbool open = True
        if timeout_ms <= 0:
            open = self._mailbox.get().wait(0, ids)
        else:
            with nogil:
                open = self._mailbox.get().wait(timeout_ms, ids)
        return list(ids) if open else None

    def close(self):
        """No news any more, and nothing is written to the descriptor."""
        self._mailbox.get().close()


cdef class Engine:
    """Owns a context on a model, and the thread that answers requests with it, side by side. Safe to use from several threads.

    :class:`lfmfast.Model` has one and is the comfortable way to it; here are token ids, bytes and counters.
    """
    cdef shared_ptr[cpp.engine] _engine
    cdef int _pid
    cdef object __weakref__

    def __cinit__(self, Model model not None, *, int64_t n_ctx, int64_t n_batch, int64_t n_ubatch, int64_t n_threads,
                  int64_t n_threads_batch, str type_k, str type_v, flash_attn, bint offload_kqv, int64_t n_parallel,
                  int64_t n_parallel_max, int64_t n_queue, int64_t cache_bytes, int64_t max_stall_ms,
                  bint deterministic=False, int64_t growth_bytes=2**62, int64_t checkpoint_tokens=256,
                  int64_t _faults_every=0, int64_t _faults_seed=0):
        cdef cpp.context_params context
        cdef cpp.engine_params params
        self._pid = cpp.current_pid()
        context.n_ctx = n_ctx
        context.n_batch = n_batch
        context.n_ubatch = n_ubatch
        context.n_threads = n_threads
        context.n_threads_batch = n_threads_batch
        context.type_k = type_k.encode()
        context.type_v = type_v.encode()
        context.flash_attn = -1 if flash_attn is None else int(bool(flash_attn))
        context.deterministic = deterministic
        context.offload_kqv = offload_kqv
        params.n_parallel = n_parallel
        params.n_parallel_max = n_parallel_max
        params.n_queue_max = n_queue
        params.growth_bytes = growth_bytes
        params.cache_bytes = cache_bytes
        params.max_stall_ms = max_stall_ms
        params.checkpoint_tokens = checkpoint_tokens
        params.faults_every = _faults_every
        params.faults_seed = _faults_seed
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        cdef shared_ptr[cpp.model] shared = model.alive()
        try:
            with nogil:
                self._engine = cpp.make_engine(shared, context, params)
        finally:
            forward_logs()

    cdef shared_ptr[cpp.engine] alive(self) except *:
        check_pid(self._pid, "model")
        cdef shared_ptr[cpp.engine] engine
        with cython.critical_section(self):
            engine = self._engine
        if not engine:
            raise ClosedError("the model was closed")
        return engine

    def submit(self, prompt, sampling, *, suppress=(), int64_t max_tokens=-1, stop=(), int64_t n_logprobs=-1,
               bint cache_prompt=True, bint pin=False, int64_t cache_reuse=0, int32_t priority=0, int64_t max_prompt_ms=-1,
               int64_t max_predict_ms=-1, markers=None, bint in_thought=False, int64_t thought_tokens=-1, thought_end=(),
               Grammar grammar=None, bint lazy=False, bint single_call=False, Mailbox mailbox=None, uint64_t mailbox_id=0):
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
        cache_prompt : bool
            Begin from what is kept of past prompts.
        pin : bool
            Keep the prompt until :meth:`unpin`.
        cache_reuse : int
            At least this many equal tokens in a row are moved into place after a changed part; 0: never. Inexact.
        priority : int
            Higher ones leave the queue first.
        max_prompt_ms, max_predict_ms : int
            Milliseconds from here to the first token (DeadlineError) and from there on (finish reason "length"); -1: no limit.
        markers : tuple of four int, optional
            The tokens that open and close a thought and a call, -1 for one that counts as text. The reply is divided by them.
        in_thought : bool
            The prompt ends inside a thought.
        thought_tokens : int
            A thought is ended after so many tokens; -1: never.
        thought_end : sequence of int
            How it is ended then: the closing token, others before it. By default that alone.
        grammar : Grammar, optional
            What the answer has to be; thoughts are free.
        lazy : bool
            The grammar is that of a call, and counts from the token that opens one.
        single_call : bool
            The answer ends after its first call.
        mailbox, mailbox_id
            A mailbox to be told of news.

        Raises
        ------
        ContextFullError
            The prompt has more tokens than the context.
        QueueFullError
            Too many requests wait already.
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
        request.pin = pin
        request.n_cache_reuse = cache_reuse
        request.priority = priority
        request.max_prompt_ms = max_prompt_ms
        request.max_predict_ms = max_predict_ms
        if markers is not None:
            (request.guide.format.thought_open, request.guide.format.thought_close, request.guide.format.call_open,
             request.guide.format.call_close) = markers
        request.guide.format.in_thought = in_thought
        request.guide.thought_tokens = thought_tokens
        request.guide.thought_end = thought_end
        if grammar is not None:
            with cython.critical_section(grammar):
                request.guide.constraint = cpp.copy_grammar(grammar._grammar)
        request.guide.lazy = lazy
        request.guide.single_call = single_call
        if mailbox is not None:
            request.inbox = mailbox._mailbox
            request.inbox_id = mailbox_id
        cdef Stream stream = Stream.__new__(Stream)
        stream._pid = self._pid
        stream._logprobs = n_logprobs >= 0
        with nogil:
            stream._stream = engine.get().submit(move(request))
        return stream

    def forget(self):
        """Drop what is kept of past prompts; pinned ones and what is being read stay."""
        cdef shared_ptr[cpp.engine] engine = self.alive()
        with nogil:
            engine.get().forget()

    def unpin(self, prompt):
        """Undo one ``submit(prompt, pin=True)``; False if it is not pinned."""
        cdef shared_ptr[cpp.engine] engine = self.alive()
        cdef vector[int32_t] tokens = prompt
        cdef cbool was = False
        with nogil:
            was = engine.get().unpin(tokens)
        return was

    def save(self, tokens):
        """The longest beginning of `tokens` that is kept, as a dict of bytes and lists; see `lfmfast.prefix_file`.

        Raises
        ------
        StateError
            Nothing of it is kept, or it can't be copied out of the context.
        """
        cdef shared_ptr[cpp.engine] engine = self.alive()
        cdef vector[int32_t] prompt = tokens
        cdef cpp.saved_prefix saved
        with nogil:
            saved = engine.get().save(prompt)
        return {"tokens": list(saved.tokens), "layout": to_bytes(saved.layout), "rows": to_bytes(saved.rows),
                "points": [(point.n_tokens, to_bytes(point.checkpoint)) for point in saved.points],
                "logits": (<char *>saved.logits.data())[:saved.logits.size() * sizeof(float)]}

    def load(self, saved, bint pin=False):
        """Take in what :meth:`save` gave.

        Raises
        ------
        StateError
            It does not fit this model, context or cache.
        """
        cdef shared_ptr[cpp.engine] engine = self.alive()
        cdef cpp.saved_prefix prefix
        cdef cpp.saved_point point
        cdef bytes logits = saved["logits"]
        prefix.tokens = saved["tokens"]
        fill_bytes(prefix.layout, saved["layout"])
        fill_bytes(prefix.rows, saved["rows"])
        for n_tokens, checkpoint in saved["points"]:
            point.n_tokens = n_tokens
            fill_bytes(point.checkpoint, checkpoint)
            prefix.points.push_back(point)
        prefix.logits.resize(len(logits) // sizeof(float))
        memcpy(prefix.logits.data(), <const char *>logits, prefix.logits.size() * sizeof(float))
        with nogil:
            engine.get().load(prefix, pin)

    def stats(self):
        """Counters since the beginning, as of the last pass: requests, tokens, passes, microseconds, the cache's size."""
        cdef shared_ptr[cpp.engine] engine = self.alive()
        return engine.get().stats()

    @property
    def n_ctx(self):
        return self.alive().get().n_ctx()

    @property
    def closed(self):
        with cython.critical_section(self):
            return not self._engine

    def close(self):
        """Cancel all requests, end the thread, free the context. May be called twice."""
        check_pid(self._pid, "model")
        cdef shared_ptr[cpp.engine] last
        with cython.critical_section(self):
            last.swap(self._engine)
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
