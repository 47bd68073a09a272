"""Model: a GGUF file, ready to chat and generate."""

from __future__ import annotations

import atexit
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from lfmfast import _model, templates
from lfmfast._cpu import default_cache_bytes, default_threads
from lfmfast._engine import Engine, Mailbox
from lfmfast._engine import Stream as NativeStream
from lfmfast.errors import ClosedError, ParameterError, TemplateError
from lfmfast.params import SamplingParams
from lfmfast.presets import DefaultSampling, default_sampling
from lfmfast.stream import Answer, Stream
from lfmfast.types import Completion

if TYPE_CHECKING:
    from lfmfast.chat import Chat

__all__ = ["Message", "Model"]

#: Sequences that a model grows to by itself, when n_parallel is None.
N_PARALLEL_MAX = 16

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

_open: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Before the interpreter and the native libraries are torn down: an engine's thread may still be computing.
    for model in list(_open):
        if not model._is_foreign():
            model.close()


class Model:
    """A model, loaded, with a context to generate in.

    Safe to use from several threads: requests are answered side by side, and what they share is read once. Use it as a
    context manager, or call :meth:`close`, to free its memory at a known moment.

    Parameters
    ----------
    path : str or os.PathLike
        The GGUF file; of a split model, its first part.
    n_ctx : int
        Tokens that prompt and answer of one request can have together; 0: as many as the model was trained with.
    n_batch, n_ubatch : int
        Tokens that are given to llama.cpp at once, and that go through the graph at once.
    n_threads, n_threads_batch : int, optional
        Threads for generating and for reading prompts. None: the physical cores of this machine; for the second: the first.
    n_parallel : int, optional
        Requests that are computed side by side, each with a memory of `n_ctx` tokens of its own. None: one to begin with, and
        as many as wait, up to 16, when there are more.
    n_queue : int
        Requests that may wait for their turn; more are refused with QueueFullError.
    cache_bytes : int, optional
        Host memory for past prompts and answers that may be asked again. None: an eighth of this machine's, at most 8 GiB.
    max_stall_ms : int
        How long reading a new prompt may hold up the answers that are being written at a time.
    n_gpu_layers : int
        Layers to keep on a GPU, if there is one; negative: all.
    progress : callable, optional
        Called with the loaded share, 0.0 to 1.0.
    type_k, type_v : str
        Types of the KV cache: "f16", "f32", "q8_0", ...
    flash_attn : bool, optional
        None: where it works.
    chat_template : str, optional
        Jinja source to use in place of the file's own.

    Raises
    ------
    ModelLoadError
        The file can't be loaded; the message has llama.cpp's reason.
    ParameterError
        A number out of its limits.

    Examples
    --------
    >>> model = Model(demo_path)
    >>> model.generate([{"role": "user", "content": "What is the capital of France?"}], temperature=0).text
    'The capital of France is Paris.'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        n_parallel: int | None = None,
        n_queue: int = 1024,
        cache_bytes: int | None = None,
        max_stall_ms: int = 250,
        n_gpu_layers: int = -1,
        use_mmap: bool = True,
        use_mlock: bool = False,
        check_tensors: bool = False,
        repack: bool = True,
        offload_kqv: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: bool | None = None,
        chat_template: str | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._closed = True  # until it is not: __del__ also sees objects whose __init__ raised
        self._pid = os.getpid()
        n_threads = default_threads() if n_threads is None else n_threads
        numbers = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch, "n_threads": n_threads,
                   "n_threads_batch": n_threads if n_threads_batch is None else n_threads_batch,
                   "n_parallel": 1 if n_parallel is None else n_parallel, "n_queue": n_queue,
                   "max_stall_ms": max_stall_ms}  # fmt: skip
        for name, value in {**numbers, "n_gpu_layers": n_gpu_layers}.items():
            _check_int(name, value)
        numbers["n_parallel_max"] = N_PARALLEL_MAX if n_parallel is None else n_parallel
        numbers["cache_bytes"] = default_cache_bytes() if cache_bytes is None else cache_bytes
        _check_int("cache_bytes", numbers["cache_bytes"], 0, 2**62)
        self.native = _model.Model.load(
            path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, use_mlock=use_mlock, check_tensors=check_tensors,
            repack=repack, progress=progress,
        )  # fmt: skip
        try:
            self._engine = Engine(self.native, type_k=type_k, type_v=type_v, flash_attn=flash_attn, offload_kqv=offload_kqv,
                                  **numbers)  # fmt: skip
        except BaseException:
            self.native.close()
            raise
        self._template_source = chat_template
        self._closed = False
        _open.add(self)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        token: str | bool | None = None,
        offline: bool | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Model:
        """Load a model from the Hugging Face Hub, or from its local cache.

        Parameters
        ----------
        name : str
            "owner/repo" or "owner/repo:QUANT" (see :func:`lfmfast.hub.resolve`), or "demo".
        token, offline, revision, cache_dir
            As in :func:`lfmfast.hub.resolve`.
        **options
            As for :class:`Model`.
        """
        from lfmfast import hub

        path = hub.resolve(name, token=token, offline=offline, revision=revision, cache_dir=cache_dir)
        return cls(path, **options)

    # --- life ---

    def close(self) -> None:
        """Cancel what is running and free everything. May be called twice, and from any thread."""
        if not self._closed:
            self._closed = True
            _open.discard(self)
            self._engine.close()
            self.native.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _is_foreign(self) -> bool:
        return self._pid != os.getpid()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._is_foreign():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<lfmfast.Model (closed)>"
        return f"<lfmfast.Model {self.native.description!r}, n_ctx {self.n_ctx}, from {self.path!r}>"

    # --- facts ---

    @property
    def path(self) -> str:
        return self.native.path

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer can have together (the number asked for, rounded up by llama.cpp)."""
        return self._engine.n_ctx

    @property
    def n_vocab(self) -> int:
        return self.native.n_vocab

    @property
    def n_params(self) -> int:
        return self.native.n_params

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self.native.size

    @property
    def description(self) -> str:
        return self.native.description

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep a recurrent state (LFM2: short convolutions)."""
        return self.native.is_hybrid

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as strings, without arrays."""
        return self.native.metadata

    @functools.cached_property
    def default_sampling(self) -> DefaultSampling:
        """The sampling parameters of a request that names none, and where each value comes from.

        In order of precedence: the file's ``general.sampling.*``, Liquid AI's values for the checkpoint, neutral.
        """
        return default_sampling(self.metadata)

    @functools.cached_property
    def template(self) -> templates.ChatTemplate:
        """The chat template, chosen by what the file's own template says.

        Raises
        ------
        TemplateError
            The file has none, and none was given.
        """
        source = self._template_source or self.native.chat_template
        if source is None:
            raise TemplateError(f"{self.path!r} has no chat template: give Model(chat_template=...), or a plain text prompt")

        def text(token: int | None) -> str:
            return "" if token is None else self.native.detokenize([token], special=True)

        return templates.chat_template_for(source, bos_token=text(self.native.bos_id), eos_token=text(self.native.eos_id),
                                           special_tokens=self.native.control_tokens, add_bos=self.native.add_bos)  # fmt: skip

    @property
    def engine(self) -> Engine:
        """The engine underneath: token ids in, bytes and counters out."""
        return self._engine

    # --- text and tokens ---

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        add_special : bool
            Put BOS (and EOS) where the vocabulary says so.
        parse_special : bool
            Take the text of a control token for that token. Leave it off for text that others wrote.
        """
        return self.native.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD. `special`: control tokens are written too."""
        return self.native.detokenize(tokens, special=special)

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text, or None."""
        return self.native.token_id(text)

    def encode(self, prompt: Prompt, *, tools: Sequence[Any] | None = None, continue_final_message: bool = False,
               **template_options: Any) -> list[int]:  # fmt: skip
        """The token ids that a prompt is read as.

        Messages are rendered with the chat template; text in them never becomes a control token. In a plain text the
        names of control tokens do, and BOS is put in front if the text does not begin with it. Token ids stay as they are.
        """
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt, parse_special=True)
            bos = self.native.bos_id
            return [bos, *tokens] if self.native.add_bos and bos is not None and tokens[:1] != [bos] else tokens
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise ParameterError(f"prompt must be a str, a list of messages or of token ids, not {type(prompt).__name__}")
        if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            for item in prompt:
                _check_int("a token id in the prompt", item, 0, self.n_vocab - 1)
            return list(cast(Sequence[int], prompt))
        messages = cast(Sequence[Message], prompt)
        rendered = self.template.render(messages, tools=tools, continue_final_message=continue_final_message,
                                        add_generation_prompt=not continue_final_message, **template_options)  # fmt: skip
        return templates.encode(rendered.segments, self.native)

    # --- generation ---

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        cache_prompt: bool = True,
        continue_final_message: bool = False,
        template_options: Mapping[str, Any] | None = None,
        **sampling_overrides: Any,
    ) -> Stream:
        """Generate, piece by piece.

        Parameters
        ----------
        prompt : str, list of messages, or list of int
            Plain text to go on with, a conversation, or token ids; see :meth:`encode`.
        tools : list, optional
            Tools for the template: OpenAI's objects, functions' schemas, or JSON text.
        max_tokens : int, optional
            None and -1: to the end of the answer or of the context.
        stop : str or list of str
            Strings that end the answer; nothing of them is shown.
        sampling : SamplingParams, optional
            What it does not set comes from :attr:`default_sampling`.
        logprobs : int, optional
            Give each token's log probability, and those of this many most likely tokens.
        cache_prompt : bool
            Begin from what the context still holds of the prompt.
        continue_final_message : bool
            Go on with the last message, an assistant's, instead of beginning a new one.
        template_options : mapping, optional
            Further variables for the chat template, such as ``keep_past_thinking``.
        **sampling_overrides
            Fields of SamplingParams: ``temperature=0``, ``seed=1``, ...

        Returns
        -------
        Stream
            Iterate over it for :class:`Piece` objects; it can be closed early.

        Raises
        ------
        ContextFullError
            The prompt has more tokens than :attr:`n_ctx`.
        ParameterError, TemplateError
            A value out of its limits, or messages that can't be rendered.
        """
        tokens = self.encode(prompt, tools=tools, continue_final_message=continue_final_message, **(template_options or {}))
        return self._submit(tokens, max_tokens=max_tokens, stop=stop, sampling=sampling, logprobs=logprobs,
                            cache_prompt=cache_prompt, **sampling_overrides)  # fmt: skip

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Generate a whole answer; options as for :meth:`stream`."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def chat(self, system: str | None = None, *, tools: Sequence[Any] | None = None,
             messages: Iterable[Message] = (), **template_options: Any) -> Chat:  # fmt: skip
        """Begin a conversation; see :class:`Chat`."""
        from lfmfast.chat import Chat

        return Chat(self, system, tools=tools, messages=messages, **template_options)

    def _submit(self, tokens: Sequence[int], *, on_end: Callable[[Answer], None] | None = None, **options: Any) -> Stream:
        return Stream(self._native_stream(tokens, **options), on_end)

    def _native_stream(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        cache_prompt: bool = True,
        mailbox: Mailbox | None = None,
        mailbox_id: int = 0,
        **sampling_overrides: Any,
    ) -> NativeStream:
        if self._closed:
            raise ClosedError("the model was closed")
        if max_tokens is not None:
            _check_int("max_tokens", max_tokens, -1)
        if logprobs is not None:
            _check_int("logprobs", logprobs, 0)
        stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ParameterError(f"stop must be a string or a list of strings, none of them empty, not {text!r}")
        params = SamplingParams() if sampling is None else sampling
        params = params.merged(**sampling_overrides).resolved(self.default_sampling.params)
        suppress = [t for t in self._end_tokens if params.ignore_eos]
        return self._engine.submit(tokens, params, suppress=suppress, max_tokens=-1 if max_tokens is None else max_tokens,
                                   stop=stops, n_logprobs=-1 if logprobs is None else logprobs, cache_prompt=cache_prompt,
                                   mailbox=mailbox, mailbox_id=mailbox_id)  # fmt: skip

    @functools.cached_property
    def _end_tokens(self) -> list[int]:
        return [token for token in range(self.n_vocab) if self.native.is_eog(token)]


def _check_int(name: str, value: object, low: int = -(2**31), high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be from {low} to {high}, not {value}")
