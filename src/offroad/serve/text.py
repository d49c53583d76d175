"""The text side of a loaded model: prompts to tokens and tokens to text, made once the engine has sent the files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from offroad.errors import RequestError
from offroad.sample.params import SamplingParams
from offroad.settings import Settings
from offroad.text.answer import AUTO, AnswerParser, Notation, Reading
from offroad.weights.source import TokenizerFiles


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, and as text where it came as text. `marks`: prefix lengths worth a checkpoint."""

    ids: list[int]
    text: str | None = None
    marks: tuple[int, ...] = ()


class TextLayer(Protocol):
    """What the server needs of `text/`. The methods that make prompts may be called from any thread."""

    generation: dict[str, Any]
    eos_ids: tuple[int, ...]
    notation: Notation

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Prompt: ...

    def prompt(self, text: str, add_special: bool) -> Prompt: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_text(self, id: int) -> str: ...

    def token_bytes(self, id: int) -> bytes: ...

    def token_id(self, token: str) -> int | None: ...

    def vocabulary(self) -> list[bytes]: ...

    def stream(self, params: SamplingParams, continues: bool, reading: Reading | None = None) -> Any: ...

    def parser(self, params: SamplingParams, reading: Reading) -> AnswerParser: ...


class ModelText:
    """The text layer of a checkpoint. Raises ModelError or SettingsError for files that cannot be used."""

    def __init__(
        self, files: TokenizerFiles, chat_template: str | None = None, reasoning: str = AUTO, tools: str = AUTO
    ) -> None:
        from offroad.text.chat_template import ChatTemplate
        from offroad.text.tokenizer import Tokenizer

        self.tokenizer = Tokenizer(files)
        self.template = ChatTemplate(files, chat_template)
        self.generation, self.eos_ids = files.generation, tuple(self.tokenizer.eos_ids)
        self.decode = self.tokenizer.decode
        self.token_bytes, self.token_id = self.tokenizer.token_bytes, self.tokenizer.token_id
        self.notation = Notation.of(self.template.source or "", self.template.reads, reasoning, tools)

    @cache  # noqa: B019 - there is one text layer, which lives as long as the server
    def vocabulary(self) -> list[bytes]:
        """The bytes of every token, for grammars. The first call takes a second or so: make it from a thread."""
        return self.tokenizer.vocabulary()

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Prompt:
        """The prompt of a conversation. Raises RequestError when the template refuses it."""
        from offroad.text.chat_template import encode_with_marks

        rendered = self.template.render(messages, **options)
        ids, marks = encode_with_marks(self.tokenizer, rendered)
        return Prompt(list(ids), rendered.text, tuple(marks))

    def prompt(self, text: str, add_special: bool) -> Prompt:
        return Prompt(list(self.tokenizer.encode(text, add_special)), text)

    def token_text(self, id: int) -> str:
        """The text of a token alone, as log-probabilities name it; bytes that are no text become U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")

    def stream(self, params: SamplingParams, continues: bool, reading: Reading | None = None) -> Any:
        from offroad.text.detokenize import OutputStream

        keep = frozenset() if reading is None else frozenset(self._marks(reading).values())
        return OutputStream(self.tokenizer, params, continues=continues, keep=keep)

    def parser(self, params: SamplingParams, reading: Reading) -> AnswerParser:
        """A parser of one answer. Special tokens that were kept for it alone do not stay in the content."""
        return reading.parser(tuple(self._marks(reading)) if params.skip_special_tokens else ())

    def _marks(self, reading: Reading) -> dict[str, int]:
        return self.tokenizer.special_within(reading.tags)


def model_text(files: TokenizerFiles, settings: Settings) -> TextLayer:
    """The text layer of a served model."""
    return ModelText(files, settings.chat_template, settings.reasoning_parser, settings.tool_call_parser)


def template_options(kwargs: dict[str, Any] | None, **named: Any) -> dict[str, Any]:
    """Keyword arguments for a template: the request's own fields over its `chat_template_kwargs`.

    Raises RequestError when the two name the same thing.
    """
    options = {name: value for name, value in named.items() if value is not None}
    twice = sorted(options.keys() & (kwargs or {}).keys() | {"tools", "messages"} & (kwargs or {}).keys())
    if twice:
        raise RequestError(
            "chat_template_kwargs",
            param="chat_template_kwargs",
            found=twice[0],
            accepted="variables that are not fields of the request",
        )
    return (kwargs or {}) | options
