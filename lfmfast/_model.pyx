# cython: language_level=3, freethreading_compatible=True
"""A loaded GGUF model: metadata and vocabulary. Also the GGUF header reader, the build's facts and the log."""

import logging
import os

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

from lfmfast cimport _cpp as cpp

from lfmfast import _backends
from lfmfast.errors import ClosedError, ForkError, ParameterError

_logger = logging.getLogger("lfmfast")


cdef int check_pid(int pid, str what) except -1:
    if pid != cpp.current_pid():
        raise ForkError(f"this {what} was made in process {pid} and can't be used in process {cpp.current_pid()} after a fork; "
                        "load the model in the child (multiprocessing: use the 'spawn' start method)")
    return 0


cdef string to_utf8(text, str name) except *:
    if not isinstance(text, str):
        raise ParameterError(f"{name} must be a str, not {type(text).__name__}")
    try:
        return (<str>text).encode("utf-8")
    except UnicodeEncodeError as e:
        raise ParameterError(f"{name} has a lone surrogate (U+{ord(text[e.start]):04X}) at position {e.start}, "
                             "which is no valid Unicode text") from None


def forward_logs():
    """Pass what llama.cpp logged to ``logging.getLogger("lfmfast")``."""
    cpp.log_set_level(max(10, _logger.getEffectiveLevel()))
    for line in cpp.log_drain():
        _logger.log(line.level, line.text.decode("utf-8", "replace"))


cdef class Model:
    """A model and its vocabulary, loaded with :meth:`load`. Safe to use from several threads."""

    def __cinit__(self):
        self._pid = cpp.current_pid()

    @staticmethod
    def load(path, *, int n_gpu_layers=-1, bint use_mmap=True, bint use_mlock=False, bint vocab_only=False,
             bint check_tensors=False, bint repack=True, progress=None):
        """Load a GGUF file.

        Parameters
        ----------
        path : str, bytes or os.PathLike
            The file; of a split model, its first part.
        n_gpu_layers : int
            Layers to keep on a GPU; negative: all, 0: compute on the CPU alone.
        progress : callable, optional
            Called in this thread with the loaded share, from 0.0 to 1.0. An exception in it stops loading.

        Raises
        ------
        ModelLoadError
            The file is missing, no GGUF, damaged, or of an unknown architecture; the message has llama.cpp's reason.
        """
        cdef cpp.model_params params
        params.n_gpu_layers = n_gpu_layers
        params.use_mmap = use_mmap
        params.use_mlock = use_mlock
        params.vocab_only = vocab_only
        params.check_tensors = check_tensors
        params.repack = repack
        cdef string name = os.fsencode(path)
        if not vocab_only:
            _backends.load_plugins()
        forward_logs()
        cdef unique_ptr[cpp.model_loader] loader
        cdef cpp.model_loader * p = new cpp.model_loader(name, params)
        loader.reset(p)
        cdef cbool done = False
        cdef Model self = Model.__new__(Model)
        try:
            while not done:
                with nogil:
                    done = p.wait(20)
                if progress is not None:
                    progress(min(1.0, p.progress()))
                forward_logs()  # and lets signal handlers run: Ctrl-C stops loading
            with nogil:
                self._model = p.take()
        finally:
            with nogil:
                loader.reset()
            forward_logs()
        if not vocab_only and n_gpu_layers != 0 and self.on_cpu:
            _backends.warn_of_cpu(n_gpu_layers)
        return self

    cdef shared_ptr[cpp.model] alive(self) except *:
        check_pid(self._pid, "model")
        cdef shared_ptr[cpp.model] model
        with cython.critical_section(self):
            model = self._model
        if not model:
            raise ClosedError("the model was closed")
        return model

    def __dealloc__(self):
        cdef shared_ptr[cpp.model] * _leaked
        if self._pid != cpp.current_pid():  # the parent's; its threads do not exist here
            _leaked = new shared_ptr[cpp.model](self._model)
            return
        with nogil:  # another thread may need the GIL to finish with the model
            self._model.reset()

    def close(self):
        """Free the model, or do so as soon as the last context on it is closed. May be called twice."""
        check_pid(self._pid, "model")
        cdef shared_ptr[cpp.model] last
        with cython.critical_section(self):
            last.swap(self._model)
        with nogil:
            last.reset()

    @property
    def closed(self):
        with cython.critical_section(self):
            return not self._model

    # --- facts ---

    @property
    def path(self):
        return os.fsdecode(self.alive().get().path())

    @property
    def description(self):
        return self.alive().get().description().decode("utf-8", "replace")

    @property
    def size(self):
        """Bytes of all tensors."""
        return self.alive().get().size()

    @property
    def n_params(self):
        return self.alive().get().n_params()

    @property
    def n_ctx_train(self):
        """Tokens of context the model was trained with."""
        return self.alive().get().n_ctx_train()

    @property
    def n_embd(self):
        return self.alive().get().n_embd()

    @property
    def n_layer(self):
        return self.alive().get().n_layer()

    @property
    def n_vocab(self):
        return self.alive().get().n_vocab()

    @property
    def on_cpu(self):
        """Whether no layer is on a GPU."""
        return bool(self.alive().get().on_cpu())

    @property
    def is_hybrid(self):
        """Whether some layers keep a recurrent state (LFM2: short convolutions), which can't be cut back."""
        return bool(self.alive().get().is_hybrid())

    @property
    def is_recurrent(self):
        """Whether all layers keep a recurrent state."""
        return bool(self.alive().get().is_recurrent())

    @property
    def metadata(self):
        """GGUF metadata as str -> str; arrays are left out (see :func:`read_gguf`)."""
        return {item.first.decode("utf-8", "replace"): item.second.decode("utf-8", "replace")
                for item in self.alive().get().metadata()}

    @property
    def chat_template(self):
        """The Jinja source in the file, or None."""
        return self.alive().get().chat_template().decode("utf-8", "replace") or None

    # --- vocabulary ---

    @property
    def bos_id(self):
        """Token id, or None; likewise below."""
        return _or_none(self.alive().get().bos())

    @property
    def eos_id(self):
        return _or_none(self.alive().get().eos())

    @property
    def eot_id(self):
        return _or_none(self.alive().get().eot())

    @property
    def pad_id(self):
        return _or_none(self.alive().get().pad())

    @property
    def add_bos(self):
        return bool(self.alive().get().add_bos())

    @property
    def control_tokens(self):
        """Texts of the control tokens and their ids."""
        return {item.second.decode("utf-8", "replace"): item.first for item in self.alive().get().control_tokens()}

    def token_id(self, text):
        """The id of the token with exactly this text, or None."""
        return _or_none(self.alive().get().token_id(to_utf8(text, "text")))

    def is_eog(self, int token):
        """Whether this token ends a generation."""
        return bool(self.alive().get().is_eog(token))

    def is_control(self, int token):
        return bool(self.alive().get().is_control(token))

    def tokenize(self, text, *, bint add_special=False, bint parse_special=False):
        """Token ids of a text.

        Parameters
        ----------
        add_special : bool
            Put BOS (and EOS) where the vocabulary says so. A rendered chat prompt has its own BOS.
        parse_special : bool
            Take the text of a control token for that token. Leave it off for text that others wrote.

        Returns
        -------
        list of int
        """
        cdef shared_ptr[cpp.model] model = self.alive()
        cdef string bytes_ = to_utf8(text, "text")
        cdef vector[int32_t] tokens
        with nogil:
            tokens = model.get().tokenize(bytes_, add_special, parse_special)
        return tokens

    def detokenize(self, tokens, *, bint special=False):
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD. `special`: control tokens are written too."""
        return self.detokenize_bytes(tokens, special=special).decode("utf-8", "replace")

    def detokenize_bytes(self, tokens, *, bint special=False):
        """The bytes of token ids."""
        cdef shared_ptr[cpp.model] model = self.alive()
        cdef vector[int32_t] ids = tokens
        cdef string text
        with nogil:
            text = model.get().detokenize(ids, special)
        return text

    def piece(self, int32_t token, *, bint special=True):
        """The bytes of one token as they stand in a text, where :meth:`detokenize` cleans up spaces."""
        return self.alive().get().piece(token, special)

    def __repr__(self):
        if self.closed:
            return "<lfmfast.lowlevel.Model (closed)>"
        return f"<lfmfast.lowlevel.Model {self.description!r} from {self.path!r}>"


cdef _or_none(int token):
    return None if token < 0 else token


def read_gguf(path, *, uint64_t max_elements=1024):
    """The header of a GGUF file, without loading a tensor.

    Returns
    -------
    dict
        ``version``; ``metadata``: key -> int, float, bool, str or list (lists are cut after `max_elements`);
        ``tensors``: list of (name, type, shape with the fastest dimension first, bytes).

    Raises
    ------
    ModelLoadError
        No readable GGUF file; the message has the reason.
    """
    cdef string name = os.fsencode(path)
    cdef cpp.gguf_header header
    with nogil:
        header = cpp.cpp_read_gguf(name, max_elements)
    forward_logs()
    metadata = {}
    for value in header.metadata:
        if value.type == b"str":
            values = [text.decode("utf-8", "replace") for text in value.strings]
        elif value.type == b"bool":
            values = [bool(x) for x in value.integers]
        else:
            values = list(value.reals) if value.reals.size() else list(value.integers)
        metadata[value.key.decode("utf-8", "replace")] = values if value.is_array else values[0] if values else None
    tensors = [(t.name.decode("utf-8", "replace"), t.type.decode(), tuple(t.shape), t.n_bytes) for t in header.tensors]
    return {"version": header.version, "metadata": metadata, "tensors": tensors}


def named_templates():
    """Names of the chat templates that llama.cpp has."""
    cdef vector[string] names
    with nogil:
        names = cpp.named_templates()
    return [name.decode() for name in names]


def render_named_template(str name, messages, bint add_generation_prompt):
    """A prompt by one of llama.cpp's own chat templates; `messages` are pairs of role and content."""
    cdef string named = name.encode()
    cdef vector[pair[string, string]] chat
    cdef string text
    for role, content in messages:
        chat.push_back(pair[string, string](<string>role.encode(), <string>content.encode()))
    with nogil:
        text = cpp.render_named_template(named, chat, add_generation_prompt)
    return text.decode()


def native_build_info():
    """(name, value) pairs about the native build and this machine."""
    cdef vector[pair[string, string]] info
    with nogil:
        info = cpp.cpp_build_info()
    forward_logs()
    return [(item.first.decode(), item.second.decode("utf-8", "replace")) for item in info]


def load_plugin(path):
    """Load ggml's library for a kind of device, and return the names of the devices."""
    cdef string name = os.fsencode(path)
    cdef vector[string] devices
    forward_logs()
    try:
        with nogil:
            devices = cpp.cpp_load_plugin(name)
    finally:
        forward_logs()
    return [device.decode("utf-8", "replace") for device in devices]
