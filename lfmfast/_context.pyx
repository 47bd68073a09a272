# cython: language_level=3, freethreading_compatible=True
"""llama_context and llama_batch, with everything checked that would make ggml end the process."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_WRITABLE
from libc.stdint cimport int64_t, uint8_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

import numpy as np

from lfmfast cimport _cpp as cpp
from lfmfast._model cimport Model, check_pid

from lfmfast._model import forward_logs
from lfmfast.errors import BusyError, ClosedError, DecodeError, ParameterError


cdef class Batch:
    """Tokens for one :meth:`Context.decode`, as llama_batch has them.

    Parameters
    ----------
    n_tokens_max : int
        Tokens it can hold.
    n_seq_max : int
        Sequences that one token can belong to.
    """
    cdef cpp.batch * _batch
    cdef int _n_readers  # calls of Context.decode that work on it

    def __cinit__(self, int64_t n_tokens_max=2048, int64_t n_seq_max=1):
        self._batch = new cpp.batch(n_tokens_max, n_seq_max)

    def __dealloc__(self):
        del self._batch

    def add(self, int64_t token, int64_t pos, seq_ids=0, *, bint output=False):
        """Add one token at position `pos` of one sequence or several; `output`: its logits are wanted."""
        cdef vector[int64_t] ids = [seq_ids] if isinstance(seq_ids, int) else seq_ids
        with cython.critical_section(self):
            self.check_unread()
            self._batch.add(token, pos, ids, output)

    def extend(self, tokens, int64_t pos, int64_t seq_id=0, *, output="last"):
        """Add consecutive tokens of one sequence, from position `pos` on; `output`: "last", "all" or "none"."""
        if output not in ("last", "all", "none"):
            raise ParameterError(f'output must be "last", "all" or "none", not {output!r}')
        cdef vector[int64_t] ids = [seq_id]
        cdef vector[int64_t] values = tokens
        cdef cbool all_ = output == "all", last = output == "last"
        cdef size_t i
        with cython.critical_section(self):
            self.check_unread()
            for i in range(values.size()):
                self._batch.add(values[i], pos + <int64_t>i, ids, all_ or (last and i + 1 == values.size()))

    def clear(self):
        with cython.critical_section(self):
            self.check_unread()
            self._batch.clear()

    cdef int check_unread(self) except -1:
        if self._n_readers:
            raise BusyError("another thread is decoding this batch")
        return 0

    @property
    def capacity(self):
        return self._batch.capacity()

    @property
    def n_outputs(self):
        with cython.critical_section(self):
            return self._batch.n_outputs()

    def __len__(self):
        with cython.critical_section(self):
            return self._batch.size()


cdef class _Logits:
    # What a logits array stands on: keeps the context's output buffer from being written while the array lives.
    cdef Context _context
    cdef Py_ssize_t _shape[2]
    cdef Py_ssize_t _strides[2]
    cdef const float * _data

    def __getbuffer__(self, Py_buffer * view, int flags):
        if flags & PyBUF_WRITABLE == PyBUF_WRITABLE:
            raise BufferError("logits are read-only; copy them to change them")
        view.buf = <void *>self._data
        view.obj = self
        view.itemsize = sizeof(float)
        view.len = self._shape[0] * self._shape[1] * sizeof(float)
        view.readonly = 1
        view.ndim = 2
        view.format = <char *>"f" if flags & PyBUF_FORMAT else <char *>NULL
        view.shape = self._shape
        view.strides = self._strides
        view.suboffsets = NULL
        view.internal = NULL

    def __dealloc__(self):
        if self._context is not None:
            with cython.critical_section(self._context):
                self._context._n_views -= 1


cdef class Context:
    """A llama_context: the memory of some sequences, and the passes over them.

    Calls from several threads take turns; :meth:`abort` does not wait.

    Parameters
    ----------
    model : lfmfast.lowlevel.Model or lfmfast.Model
    n_ctx : int
        Tokens of all sequences together; 0: the model's training length. llama.cpp rounds it up.
    n_batch, n_ubatch : int
        Tokens that one decode call, and one pass through the graph, can hold.
    n_seq_max : int
        Sequences.
    n_outputs_max : int
        Tokens of one decode call that may give logits; 0: `n_batch`. A small number saves memory.
    n_threads, n_threads_batch : int
        Threads of single-token passes, and of others (0: the same).
    type_k, type_v : str
        Types of the KV cache: "f16", "f32", "q8_0", ...
    flash_attn : bool, optional
        None: where it works.
    kv_unified : bool
        One KV buffer for all sequences instead of one each.
    deterministic : bool
        The logits of a sequence do not depend on what else is in a pass, on how it was cut into passes, or on the number of
        threads. See :class:`lfmfast.Model`.

    Raises
    ------
    ParameterError
        A number out of its limits, or a combination that llama.cpp refuses.
    """
    cdef shared_ptr[cpp.context] _context
    cdef Model _model
    cdef int _pid
    cdef Py_ssize_t _n_views
    cdef int _n_writers
    cdef object __weakref__

    def __cinit__(self, model, *, int64_t n_ctx=4096, int64_t n_batch=2048, int64_t n_ubatch=512, int64_t n_seq_max=1,
                  int64_t n_threads=1, int64_t n_threads_batch=0, str type_k="f16", str type_v="f16", flash_attn=None,
                  bint kv_unified=False, bint offload_kqv=True, int64_t n_outputs_max=0, int64_t n_rs_seq=0,
                  bint deterministic=False):
        cdef cpp.context_params params
        self._pid = cpp.current_pid()
        self._model = model if isinstance(model, Model) else model.native
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_outputs_max = n_outputs_max
        params.n_rs_seq = n_rs_seq
        params.n_threads = n_threads
        params.n_threads_batch = n_threads_batch
        params.type_k = type_k.encode()
        params.type_v = type_v.encode()
        params.flash_attn = -1 if flash_attn is None else int(bool(flash_attn))
        params.deterministic = deterministic
        params.kv_unified = kv_unified
        params.offload_kqv = offload_kqv
        cdef shared_ptr[cpp.model] shared = self._model.alive()
        try:
            with nogil:
                self._context = cpp.make_context(shared, params)
        finally:
            forward_logs()

    cdef shared_ptr[cpp.context] alive(self) except *:
        check_pid(self._pid, "context")
        cdef shared_ptr[cpp.context] context
        with cython.critical_section(self):
            context = self._context
        if not context:
            raise ClosedError("the context was closed")
        return context

    cdef int check_unseen(self) except -1:
        # Before what overwrites or frees the logits; in a critical section.
        if self._n_views:
            raise BufferError(f"{self._n_views} array(s) still show the logits of the last decode; delete them or copy what "
                              "you need (logits.copy()) before this call")
        return 0

    def __dealloc__(self):
        cdef shared_ptr[cpp.context] * _leaked
        if self._pid != cpp.current_pid():
            _leaked = new shared_ptr[cpp.context](self._context)
            return
        with nogil:
            self._context.reset()

    def close(self):
        """Free the context; BufferError while logits arrays live. May be called twice."""
        cdef shared_ptr[cpp.context] last
        with cython.critical_section(self):
            if not self._context:
                return
            check_pid(self._pid, "context")
            self.check_unseen()
            last.swap(self._context)
        last.get().abort()
        with nogil:
            last.reset()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        if kind is None or not self._n_views:  # never hide the exception that is on its way
            self.close()

    @property
    def closed(self):
        with cython.critical_section(self):
            return not self._context

    @property
    def model(self):
        return self._model

    @property
    def n_ctx(self):
        return self.alive().get().n_ctx()

    @property
    def n_ctx_seq(self):
        """Tokens that one sequence can hold."""
        return self.alive().get().n_ctx_seq()

    @property
    def n_batch(self):
        return self.alive().get().n_batch()

    @property
    def n_ubatch(self):
        return self.alive().get().n_ubatch()

    @property
    def n_seq_max(self):
        return self.alive().get().n_seq_max()

    def decode(self, Batch batch not None):
        """Process a batch (llama_decode).

        Raises
        ------
        ParameterError
            A token, sequence or position out of range, more tokens than `n_batch`, or positions that do not continue
            their sequence. Nothing was changed.
        ContextFullError
            No room. Nothing was changed.
        CancelledError
            :meth:`abort` was called. The batch's sequences are in an unknown state: clear or restore them.
        DecodeError
            llama.cpp failed; likewise.
        BufferError
            An array of the last logits is still alive.

        While it runs, changing the batch is a BusyError.
        """
        cdef shared_ptr[cpp.context] context = self.alive()
        with cython.critical_section(self, batch):
            self.check_unseen()
            self._n_writers += 1
            batch._n_readers += 1
        try:
            with nogil:
                context.get().decode(batch._batch[0])
        finally:
            with cython.critical_section(self, batch):
                self._n_writers -= 1
                batch._n_readers -= 1
            forward_logs()

    def abort(self):
        """Stop the decode that is running in another thread, if any (CPU only)."""
        self.alive().get().abort()

    @property
    def logits(self):
        """Logits of the last decode: a read-only float32 array of shape (n_outputs, n_vocab), in batch order.

        It shows llama.cpp's own buffer. While it, or a view of it, lives, the context refuses to decode or close.
        """
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef _Logits owner = _Logits.__new__(_Logits)
        with cython.critical_section(self):
            if self._n_writers:
                raise BusyError("another thread is decoding on this context")
            owner._context = self  # from here on nothing can overwrite the buffer until `owner` is gone
            self._n_views += 1
        cdef const float * data
        with nogil:
            data = context.get().logits()
        if data == NULL:
            raise DecodeError("there are no logits: nothing was decoded, or no token of the batch had output=True")
        owner._data = data
        owner._shape[0] = context.get().n_outputs()
        owner._shape[1] = self._model.n_vocab
        owner._strides[0] = owner._shape[1] * sizeof(float)
        owner._strides[1] = sizeof(float)
        return np.asarray(owner)

    # --- memory ---

    def seq_rm(self, int64_t seq_id, int64_t p0=-1, int64_t p1=-1):
        """Remove positions [p0, p1) of a sequence; -1: from the start, to the end.

        Returns
        -------
        bool
            False: a recurrent state can't be cut there, and nothing was changed.
        """
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef cbool removed
        with nogil:
            removed = context.get().seq_rm(seq_id, p0, p1)
        return bool(removed)

    def seq_cp(self, int64_t src, int64_t dst, int64_t p0=-1, int64_t p1=-1):
        """Copy positions [p0, p1) of a sequence. A recurrent state is copied as it is now, whatever the range."""
        cdef shared_ptr[cpp.context] context = self.alive()
        with nogil:
            context.get().seq_cp(src, dst, p0, p1)

    def seq_keep(self, int64_t seq_id):
        """Remove all other sequences."""
        cdef shared_ptr[cpp.context] context = self.alive()
        with nogil:
            context.get().seq_keep(seq_id)

    def seq_pos_min(self, int64_t seq_id):
        """First position kept, or -1 when the sequence is empty."""
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef int64_t pos
        with nogil:
            pos = context.get().seq_pos_min(seq_id)
        return pos

    def seq_pos_max(self, int64_t seq_id):
        """Last position kept, or -1 when the sequence is empty."""
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef int64_t pos
        with nogil:
            pos = context.get().seq_pos_max(seq_id)
        return pos

    def clear(self, *, bint data=False):
        """Forget all sequences; `data`: overwrite their buffers too."""
        cdef shared_ptr[cpp.context] context = self.alive()
        with nogil:
            context.get().clear(data)

    def state_seq_get(self, int64_t seq_id, *, bint partial_only=False):
        """One sequence's state as bytes; `partial_only`: only the part that can't be cut (a hybrid model's recurrent state)."""
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef vector[uint8_t] data
        with nogil:
            data = context.get().state_seq_get(seq_id, partial_only)
        return bytes((<char *>data.data())[:data.size()]) if data.size() else b""

    def state_seq_set(self, int64_t seq_id, const uint8_t[::1] data not None, *, bint partial_only=False):
        """Restore what :meth:`state_seq_get` gave, into any sequence.

        Raises
        ------
        StateError
            The bytes are not such a state, or of another model or context; the sequence is empty then.
        """
        cdef shared_ptr[cpp.context] context = self.alive()
        cdef const uint8_t * p = &data[0] if data.shape[0] else NULL
        cdef size_t n = data.shape[0]
        try:
            with nogil:
                context.get().state_seq_set(seq_id, p, n, partial_only)
        finally:
            forward_logs()

    def set_n_threads(self, int64_t n_threads, int64_t n_threads_batch):
        """Change the thread counts, up to the larger of the two at creation."""
        cdef shared_ptr[cpp.context] context = self.alive()
        with nogil:
            context.get().set_n_threads(n_threads, n_threads_batch)
