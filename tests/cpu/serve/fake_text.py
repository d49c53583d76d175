"""A text layer of bytes: token = byte, 256 = eos. Just enough of `text/`'s behaviour for the server's tests."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from offroad.errors import RequestError
from offroad.serve.text import Prompt
from offroad.text.answer import Notation

EOS = 256


@dataclass(frozen=True)
class Delta:
    text: str
    stopped: bool = False
    stop_reason: str | None = None


class Stream:
    def __init__(self, params, continues: bool) -> None:
        self.params, self.decoder = params, codecs.getincrementaldecoder("utf-8")("replace")
        self.held, self.stopped, self.tokens_used = "", None, 0

    def push(self, ids, *, ends_with_stop_token=False) -> Delta:
        out = ""
        for i, id in enumerate(ids):
            if self.stopped is not None:
                break
            self.tokens_used += 1
            if ends_with_stop_token and i == len(ids) - 1:
                break
            out += self._take(self.decoder.decode(bytes([id]) if id < 256 else b""))
        return Delta(out, self.stopped is not None, self.stopped)

    def finish(self) -> Delta:
        out = self._take(self.decoder.decode(b"", True)) + self.held
        return Delta(out, self.stopped is not None, self.stopped)

    def _take(self, new: str) -> str:
        text = self.held + new
        for stop in self.params.stop:
            if stop in text:
                self.stopped, self.held = stop, ""
                return text[: text.index(stop)]
        keep = max((n for stop in self.params.stop for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


class FakeText:
    eos_ids = (EOS,)

    def __init__(self, generation: dict, notation: Notation = Notation()) -> None:
        self.generation = generation
        self.options: dict = {}
        self.notation = notation
        self.tokens: dict[str, int] = {}
        self.ending = ""

    def chat(self, messages, *, add_generation_prompt=True, continue_final_message=False, **options) -> Prompt:
        self.options = options | {"add": add_generation_prompt, "continue": continue_final_message}
        if messages[0]["content"] == "!bad":
            raise RequestError("the chat template refuses", param="messages")
        texts = [
            c if isinstance(c := m.get("content") or "", str) else "\n".join(p["text"] for p in c) for m in messages
        ]
        text = "".join(texts) + (self.ending if add_generation_prompt else "")
        return Prompt(list(text.encode()), text, (len(texts[0]),))

    def prompt(self, text, add_special) -> Prompt:
        return Prompt(list(text.encode()), text)

    def decode(self, ids) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, id) -> str:
        return "<eos>" if id == EOS else chr(id)

    def vocabulary(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)]

    def token_bytes(self, id) -> bytes:
        return b"" if id == EOS else bytes([id])

    def token_id(self, token) -> int | None:
        return self.tokens.get(token)

    def stream(self, params, continues, reading=None):
        return Stream(params, continues)

    def parser(self, params, reading):
        return reading.parser()
