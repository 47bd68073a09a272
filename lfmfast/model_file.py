"""ModelFile: what a loaded model file tells, and its texts as tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from lfmfast import _model, templates
from lfmfast._replies import Chunk, ReplyMemory
from lfmfast.errors import ParameterError, TemplateError
from lfmfast.prefix_file import Fingerprint
from lfmfast.presets import DefaultSampling, default_sampling

__all__ = ["Message", "ModelFile", "Prompt", "check_int"]

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class ModelFile:
    """What :class:`lfmfast.Model` knows without its engine."""

    native: _model.Model
    deterministic: bool = False
    _replies: ReplyMemory
    _template_source: str | None

    @property
    def path(self) -> str:
        return self.native.path

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

        Messages are rendered with the chat template; text in them never becomes a control token. A reply that this model
        generated keeps the tokens that it was generated as. In a plain text the names of control tokens do become these, and
        BOS is put in front if the text does not begin with it. Token ids stay as they are.
        """
        return self._encode(prompt, tools=tools, continue_final_message=continue_final_message, **template_options)[0]

    def _encode(self, prompt: Prompt, *, remembered: bool = True, continue_final_message: bool = False,
                add_generation_prompt: bool | None = None, **options: Any) -> tuple[list[int], list[Chunk]]:  # fmt: skip
        """Token ids, and of messages the chunks that they are of."""
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt, parse_special=True)
            bos = self.native.bos_id
            return [bos, *tokens] if self.native.add_bos and bos is not None and tokens[:1] != [bos] else tokens, []
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
            raise ParameterError(f"prompt must be a str, a list of messages or of token ids, not {type(prompt).__name__}")
        if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            for item in prompt:
                check_int("a token id in the prompt", item, 0, self.n_vocab - 1)
            return list(cast("Sequence[int]", prompt)), []
        opened = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        messages = cast("Sequence[Message]", prompt)
        rendered = self.template.render(self._as_written(messages) if remembered else messages,
                                        continue_final_message=continue_final_message,
                                        add_generation_prompt=opened, **options)  # fmt: skip
        chunks = self._replies.encode(rendered.segments, remembered=remembered)
        return [token for chunk in chunks for token in chunk.ids], chunks

    def _as_written(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages with replies that the model gave as it wrote them, where they come back divided into their parts."""
        return self._replies.as_written(messages) if self.template.is_native else messages

    @functools.cached_property
    def end_tokens(self) -> list[int]:
        """Tokens that end an answer."""
        return [token for token in range(self.n_vocab) if self.native.is_eog(token)]

    @functools.cached_property
    def _fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.path)


def check_int(name: str, value: object, low: int = -(2**31), high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")
    if not low <= value <= high:
        raise ParameterError(f"{name} must be from {low} to {high}, not {value}")
