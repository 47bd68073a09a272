"""Model: a GGUF file, ready to chat and generate."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from lfmfast import _many, _model, prefix
from lfmfast._cpu import default_cache_bytes, default_threads, memory_bytes
from lfmfast._engine import Engine, Mailbox
from lfmfast._engine import Stream as NativeStream
from lfmfast._replies import ReplyMemory
from lfmfast._request import Asked, Options, shown_tools
from lfmfast.deterministic import check_weights
from lfmfast.errors import ClosedError, ParameterError
from lfmfast.model_file import Message, ModelFile, Prompt, check_int
from lfmfast.params import SamplingParams
from lfmfast.prefix import Prefix
from lfmfast.stream import Answer, Stream
from lfmfast.types import Completion

if TYPE_CHECKING:
    from lfmfast.chat import Chat

__all__ = ["Message", "Model"]

#: Sequences that a model grows to by itself, when n_parallel is None.
N_PARALLEL_MAX = 16

Prompts = list[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]
Progress = Callable[[int, int], object]

_open: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Before the interpreter and the native libraries are torn down: an engine's thread may still be computing.
    for model in list(_open):
        if not model._is_foreign():
            model.close()


class Model(ModelFile):
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
        Tokens of a prompt that go through the graph at once: the lesser of the two. By default 256 on a CPU and 512 on a GPU
        or with flash attention, as they measured best.
    n_threads, n_threads_batch : int, optional
        Threads for generating and for reading prompts. None: the physical cores of this machine; for the second: the first.
    n_parallel : int, optional
        Requests that are computed side by side, each with a memory of `n_ctx` tokens of its own. None: one to begin with, and
        as many as wait, up to 16 and a quarter of this machine's memory, when there are more.
    n_queue : int
        Requests that may wait for their turn; more are refused with QueueFullError.
    cache_bytes : int, optional
        Host memory for past prompts and answers that may be asked again. None: an eighth of this machine's, at most 8 GiB.
    max_stall_ms : int
        How long reading a new prompt may hold up the answers that are being written at a time.
    n_gpu_layers : int
        Layers to keep on a GPU, if there is one; negative: all, 0: compute on the CPU alone. A RuntimeWarning says why a GPU
        that a plugin (``lfmfast[cuda13]``) is installed for can't be used, or that there is none for a positive number.
    progress : callable, optional
        Called with the loaded share, 0.0 to 1.0.
    type_k, type_v : str
        Types of the KV cache: "f16", "f32", "q8_0", ...
    flash_attn : bool, optional
        None: on a GPU, or where plain attention would need a large buffer (on a CPU plain attention is the faster one).
    chat_template : str, optional
        Jinja source to use in place of the file's own, or the name of a template that llama.cpp has ("chatml").
    deterministic : bool
        A request's tokens and logprobs depend on the request alone, bit for bit: not on what runs beside it, what is cached,
        or the number of threads. On a CPU only; :mod:`lfmfast.deterministic` says what it needs.

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
        n_ubatch: int | None = None,
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
        deterministic: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._closed = True  # until it is not: __del__ also sees objects whose __init__ raised
        self._pid = os.getpid()
        n_threads = default_threads() if n_threads is None else n_threads
        if n_ubatch is not None:
            check_int("n_ubatch", n_ubatch, 1)
        numbers = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch or 0, "n_threads": n_threads,
                   "n_threads_batch": n_threads if n_threads_batch is None else n_threads_batch,
                   "n_parallel": 1 if n_parallel is None else n_parallel, "n_queue": n_queue,
                   "max_stall_ms": max_stall_ms}  # fmt: skip
        for name, value in {**numbers, "n_gpu_layers": n_gpu_layers}.items():
            check_int(name, value)
        numbers["n_parallel_max"] = N_PARALLEL_MAX if n_parallel is None else n_parallel
        numbers["cache_bytes"] = default_cache_bytes() if cache_bytes is None else cache_bytes
        check_int("cache_bytes", numbers["cache_bytes"], 0, 2**62)
        numbers["growth_bytes"] = memory_bytes() // 4
        self.deterministic = bool(deterministic)
        self._exact_kernels = check_weights(path, repack=repack) if deterministic else ""
        self.native = _model.Model.load(
            path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, use_mlock=use_mlock, check_tensors=check_tensors,
            repack=repack, progress=progress,
        )  # fmt: skip
        try:
            self._engine = Engine(self.native, type_k=type_k, type_v=type_v, flash_attn=flash_attn, offload_kqv=offload_kqv,
                                  deterministic=deterministic, **numbers)  # fmt: skip
        except BaseException:
            self.native.close()
            raise
        self._template_source = chat_template
        self._replies = ReplyMemory(self.native)
        n_slots = numbers["n_parallel_max"]
        self._n_ahead = n_slots + min(n_queue, max(n_slots, 4))  # of many requests, those that are submitted at a time
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

    # --- the engine ---

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer can have together (the number asked for, rounded up by llama.cpp)."""
        return self._engine.n_ctx

    @property
    def engine(self) -> Engine:
        """The engine underneath: token ids in, bytes and counters out."""
        return self._engine

    # --- generation ---

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_budget: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        json_schema: Mapping[str, Any] | bool | None = None,
        grammar: str | None = None,
        regex: str | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        cache_prompt: bool = True,
        cache_reuse: int = 0,
        priority: int = 0,
        t_max_prompt_ms: int | None = None,
        t_max_predict_ms: int | None = None,
        continue_final_message: bool = False,
        template_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Stream:
        """Generate, piece by piece.

        Parameters
        ----------
        prompt : str, list of messages, or list of int
            Plain text to go on with, a conversation, or token ids; see :meth:`encode`.
        tools : list, optional
            Tools that the model may call: OpenAI's objects, functions' schemas, or JSON text. Those whose function has
            ``"strict": True`` hold it to their schemas.
        tool_choice : str or mapping, optional
            "auto": the model decides; "none": it gets to see no tools; "required": it has to call one; ``{"type": "function",
            "function": {"name": ...}}``: this one.
        parallel_tool_calls : bool
            False: at most one call.
        reasoning_budget : int, optional
            Tokens that a thought can have; then it is ended. None and -1: any number.
        response_format : mapping, optional
            What the answer has to be, as OpenAI writes it: ``{"type": "json_object"}``, or ``{"type": "json_schema",
            "json_schema": {"schema": ...}}``. Where there are tools, the model may call them instead.
        json_schema : mapping or bool, optional
            The answer is JSON of this schema; likewise. A schema that can't be enforced is refused.
        grammar, regex : str, optional
            The answer follows this grammar (GBNF, from its rule ``root`` on), or matches this regular expression as a whole.
        max_tokens : int, optional
            None and -1: to the end of the answer or of the context.
        stop : str or list of str
            Strings that end the answer; nothing of them is shown.
        sampling : SamplingParams, optional
            What it does not set comes from :attr:`default_sampling`.
        logprobs : int, optional
            Give each token's log probability, and those of this many most likely tokens.
        cache_prompt : bool
            Begin from what is kept of past prompts, and take replies that come back as text as they were generated.
        cache_reuse : int
            Behind a part of the prompt that was removed, at least this many equal tokens in a row are moved into their new
            place instead of being read again; 0: never. The result is not exactly that of reading them.
        priority : int
            Requests with a higher one leave the queue first.
        t_max_prompt_ms : int, optional
            Milliseconds until the first token, the time in the queue included; later it is a DeadlineError.
        t_max_predict_ms : int, optional
            Milliseconds from the first token on; then the answer ends with finish reason "length".
        continue_final_message : bool
            Go on with the last message, an assistant's, instead of beginning a new one.
        template_options : mapping, optional
            Further variables for the chat template, such as ``keep_past_thinking``.
        **more
            Fields of SamplingParams (``temperature=0``, ``seed=1``, ...), and seldom wanted: `reasoning_format` ("none":
            thoughts stay in the text, with their markers), `reasoning_budget_message` (put at the end of a thought over its
            budget), `parse_tool_calls` (False: calls stay in the text).

        Returns
        -------
        Stream
            Iterate over it for :class:`Piece` objects; it can be closed early.

        Raises
        ------
        ContextFullError
            The prompt has more tokens than :attr:`n_ctx`.
        QueueFullError
            `n_queue` requests wait already.
        ParameterError, TemplateError
            A value out of its limits, or messages that can't be rendered.
        """
        asked = self._asked(prompt, tools=tools, continue_final_message=continue_final_message,
                            template_options=template_options, cache_prompt=cache_prompt, tool_choice=tool_choice)  # fmt: skip
        return self._submit(asked, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls,
                            reasoning_budget=reasoning_budget, response_format=response_format, json_schema=json_schema,
                            grammar=grammar, regex=regex, max_tokens=max_tokens, stop=stop, sampling=sampling,
                            logprobs=logprobs, cache_prompt=cache_prompt, cache_reuse=cache_reuse, priority=priority,
                            t_max_prompt_ms=t_max_prompt_ms, t_max_predict_ms=t_max_predict_ms, **more)  # fmt: skip

    @overload
    def generate(self, prompt: Prompt, *, n: Literal[1] = 1, progress: Progress | None = None,
                 return_errors: Literal[False] = False, **options: Any) -> Completion: ...  # fmt: skip
    @overload
    def generate(self, prompt: Prompt, *, n: int, progress: Progress | None = None,
                 return_errors: Literal[False] = False, **options: Any) -> list[Completion]: ...  # fmt: skip
    @overload
    def generate(self, prompt: Prompt, *, n: int, progress: Progress | None = None,
                 return_errors: Literal[True], **options: Any) -> list[Completion | Exception]: ...  # fmt: skip
    @overload
    def generate(self, prompt: Prompts, *, progress: Progress | None = None,
                 return_errors: Literal[False] = False, **options: Any) -> list[Completion]: ...  # fmt: skip
    @overload
    def generate(self, prompt: Prompts, *, progress: Progress | None = None,
                 return_errors: Literal[True], **options: Any) -> list[Completion | Exception]: ...  # fmt: skip
    def generate(self, prompt: Any, *, n: int = 1, progress: Progress | None = None, return_errors: bool = False,
                 **options: Any) -> Any:  # fmt: skip
        """Generate a whole answer, several to one prompt, or one to each of many prompts.

        Parameters
        ----------
        prompt : str, list of messages, list of int, or list of such prompts
            As for :meth:`stream`. The answers to a list of prompts come as a list in the same order; they are computed side
            by side, and what the prompts share is read once.
        n : int
            Answers to one prompt, which is read once; more than one come as a list. With a `seed`, they have this seed and
            the following ones.
        progress : callable, optional
            Called with the number of answers that are done and the number of all, after each.
        return_errors : bool
            Put the exception in the place of an answer that failed, and go on. Otherwise the first one is raised, and the
            other requests are cancelled, as they are by Ctrl-C.
        **options
            As for :meth:`stream`, the same for all.

        Examples
        --------
        >>> model = Model(demo_path)
        >>> [done.text for done in model.generate(["1, 2, 3", "Once upon a"], temperature=0, max_tokens=3)]
        [...]
        """
        many = isinstance(prompt, (list, tuple)) and any(isinstance(item, (str, list, tuple)) for item in prompt)
        check_int("n", n, 1)
        if many and n > 1:
            raise ParameterError(f"n is for a single prompt, and these are {len(prompt)}: put each prompt in the list n times")
        if not many and n == 1 and progress is None and not return_errors:
            with self.stream(prompt, **options) as stream:
                return stream.result()
        order, requests = _many.requests_of(self, prompt, n, many, options)
        results = _many.collect(_many.answers(self, requests, self._n_ahead), order, progress, return_errors)
        return results if many or n > 1 else results[0]

    def generate_each(self, requests: Iterable[tuple[Prompt, Mapping[str, Any]] | None], *,
                      n_ahead: int | None = None) -> _many.Answers:  # fmt: skip
        """Answer a stream of requests, of any length, each with options of its own.

        Requests are taken as there is room for them, so neither they nor the answers need to fit in memory.

        Parameters
        ----------
        requests : iterable of (prompt, options)
            As for :meth:`stream`. A None in place of one: there is none until the next answer has come.
        n_ahead : int, optional
            Requests that are submitted and not answered at a time. None: enough to keep the engine busy.

        Yields
        ------
        (int, Completion or Exception)
            The number of a request, from 0, and what came of it, as they end. Leaving early cancels what is running.

        Examples
        --------
        >>> model = Model(demo_path)
        >>> for i, done in model.generate_each((f"{n}, {n + 1},", {"max_tokens": 3, "seed": n}) for n in range(100)):
        ...     pass
        """
        if n_ahead is not None:
            check_int("n_ahead", n_ahead, 1)
        return _many.answers(self, _many.of_requests(self, requests), n_ahead or self._n_ahead)

    # --- what is kept ---

    def warm(self, prompt: Prompt, *, tools: Sequence[Any] | None = None, pin: bool = True, **template_options: Any) -> Prefix:
        """Read the beginning of prompts to come, so that they need not.

        Parameters
        ----------
        prompt : str, list of messages, or list of int
            The beginning. Messages are read without the opening of a reply: any conversation can go on from them.
        tools : list, optional
            Tools for the template.
        pin : bool
            Keep it until :meth:`Prefix.release`, whatever else comes.
        **template_options
            Further variables for the chat template.

        Raises
        ------
        StateError
            It can't be pinned: `cache_bytes` is too small for it, or it can't be copied out of the context.
        """
        return prefix.read(self, prefix.shared_beginning(self, prompt, tools, template_options), pin)

    def save_prefix(self, path: str | os.PathLike[str], prompt: Prompt, *, tools: Sequence[Any] | None = None,
                    **template_options: Any) -> None:  # fmt: skip
        """Read the beginning of prompts, if it is not kept, and write it to a file: :meth:`warm` and :meth:`Prefix.save`."""
        with self.warm(prompt, tools=tools, **template_options) as warm:
            warm.save(path)

    def load_prefix(self, path: str | os.PathLike[str], pin: bool = False) -> Prefix:
        """Take in what :meth:`Prefix.save`, :meth:`save_prefix` or :meth:`Chat.save` wrote, in place of reading it.

        Raises
        ------
        StateError
            It is no such file, it is damaged, it was made with another model, or it does not fit here.
        """
        return prefix.load(self, path, pin)[0]

    def chat(self, system: str | None = None, *, tools: Sequence[Any] | None = None,
             messages: Iterable[Message] = (), **template_options: Any) -> Chat:  # fmt: skip
        """Begin a conversation; see :class:`Chat`."""
        from lfmfast.chat import Chat

        return Chat(self, system, tools=tools, messages=messages, **template_options)

    def load_chat(self, path: str | os.PathLike[str]) -> Chat:
        """The conversation that :meth:`Chat.save` wrote; it goes on without being read again. Raises as :meth:`load_prefix`."""
        from lfmfast.chat import Chat

        return Chat._loaded(self, path)

    # --- requests ---

    def _asked(self, prompt: Prompt, *, tools: Sequence[Any] | None = None, continue_final_message: bool = False,
               template_options: Mapping[str, Any] | None = None, cache_prompt: bool = True,
               tool_choice: Any = None) -> Asked:  # fmt: skip
        shown = shown_tools(tools, tool_choice)
        tokens, chunks = self._encode(prompt, tools=shown, continue_final_message=continue_final_message,
                                      remembered=cache_prompt and not self.deterministic,
                                      **(template_options or {}))  # fmt: skip
        return Asked(tokens, self._replies.watcher(chunks) if chunks else None, tools, bool(chunks))

    def _submit(self, asked: Asked, **options: Any) -> Stream:
        answer = Answer()
        return Stream(self._native_stream(asked, answer, **options), answer)

    def _native_stream(self, asked: Asked, answer: Answer, *, mailbox: Mailbox | None = None, mailbox_id: int = 0,
                       checked: Options | None = None, **options: Any) -> NativeStream:  # fmt: skip
        checked = self._options(**{"tools": asked.tools, **options}) if checked is None else checked
        return self._begin(asked, answer, checked, mailbox, mailbox_id)

    def _options(self, **options: Any) -> Options:
        if self._closed:
            raise ClosedError("the model was closed")
        return Options.check(self, **options)

    def _begin(self, asked: Asked, answer: Answer, options: Options, mailbox: Mailbox | None, mailbox_id: int) -> NativeStream:
        native, reader, divider = options.begin(self, asked)
        stream = self._engine.submit(asked.tokens, options.params, mailbox=mailbox, mailbox_id=mailbox_id, **native)
        answer.on_end = asked.on_end
        answer.read_with(reader, divider)
        return stream
