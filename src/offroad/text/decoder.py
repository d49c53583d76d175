"""Token strings to bytes, as the `decoder` section of a tokenizer.json says, one token at a time.

The `tokenizers` library decodes whole sequences only. Streaming needs the bytes of each token, so the decoder is read
into a function of one token plus what happens once at the start of the text. Exact for the decoders of the language
models in use (byte-level BPE; SentencePiece with or without byte fallback); any other is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from offroad.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ACCEPTED = "ByteLevel; Metaspace; or Replace, ByteFallback, Fuse and Strip in this order"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class PieceDecoder:
    """How token strings become bytes.

    `byte_level`: characters stand for bytes. `replace`: (old, new) pairs applied to each token. `byte_fallback`: tokens
    `<0xHH>` are bytes. At the start of a text, `first_drops` is removed everywhere in the first token (Metaspace) and
    up to `strip` copies of `strip_char` are removed (Strip).
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    first_drops: str = ""
    strip: int = 0
    strip_char: str = " "

    def piece(self, token: str, first: bool = False) -> bytes:
        """Bytes of one token; `first` when it is the first one of a text."""
        if self.byte_level:
            values = [_ALPHABET.get(c) for c in token]
            # As in the library: a token with any character outside the alphabet (an added one) is plain text.
            return token.encode() if None in values else bytes(values)
        if first and self.first_drops:
            token = token.replace(self.first_drops, "")
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match.group(1), 16)])
        return token.encode()


def read_decoder(spec: dict[str, Any] | None) -> PieceDecoder:
    """The decoder that a tokenizer.json's `decoder` section describes; ModelError names one that is not supported."""
    steps = list(spec["decoders"]) if spec and spec["type"] == "Sequence" else [spec or {"type": "none"}]
    found: dict[str, Any] = {}
    order = {"Replace": 0, "ByteLevel": 0, "Metaspace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
    previous = "Replace"
    for step in steps:
        kind = step["type"]
        if order.get(kind, -1) < order[previous] or (kind == "Strip" and (previous != "Fuse" or step["stop"])):
            raise _unsupported(steps)
        previous = kind
        if kind == "ByteLevel":
            found["byte_level"] = True
        elif kind == "Metaspace":
            mark = step.get("replacement", "▁")
            found["replace"] = ((mark, " "),)
            if step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True):
                found["first_drops"] = mark
        elif kind == "Replace":
            if "String" not in step["pattern"]:
                raise _unsupported(steps)
            found["replace"] = (*found.get("replace", ()), (step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            found["byte_fallback"] = True
        elif kind == "Strip":
            found["strip"], found["strip_char"] = step["start"], step["content"]
    if found.get("byte_level") and len(steps) > 1:
        raise _unsupported(steps)
    return PieceDecoder(**found)


def _unsupported(steps: list[dict[str, Any]]) -> ModelError:
    return ModelError(
        "decoder of the tokenizer is not supported",
        found=", ".join(str(s.get("type")) for s in steps),
        accepted=_ACCEPTED,
        next="pass --tokenizer with a tokenizer.json that has one of these decoders",
    )
