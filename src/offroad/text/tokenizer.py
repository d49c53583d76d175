"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable

import tokenizers

from offroad.errors import ModelError
from offroad.text.decoder import read_decoder
from offroad.weights.source import TokenizerFiles


class Tokenizer:
    """Encodes and decodes; also knows every token's exact bytes, which streaming and tool parsers need.

    Decoding is done here from token bytes rather than by the library, so that a stream and a whole decode can agree on
    every sequence. The two differ only where the bytes are not valid UTF-8: here each invalid part is one U+FFFD, as in
    Python's `errors="replace"`; the library replaces a whole run of fallback bytes if any of them is invalid.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
            spec = json.loads(files.tokenizer_json)
        except Exception as e:  # the library raises bare Exception for a text that it cannot read
            raise ModelError("tokenizer.json cannot be read", found=str(e)[:200], accepted="a tokenizer.json") from e
        self._backend.no_truncation()
        self._backend.no_padding()
        self._decoder = read_decoder(spec.get("decoder"))
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._id_of("bos_token", files.bos_token)
        eos = self._id_of("eos_token", files.eos_token)
        # The tokenizer's own ends a chat's turn; a config without a generation_config often names only that of pages.
        self.eos_ids = tuple(dict.fromkeys([*files.eos_ids, *(() if eos is None else (eos,))]))
        self._add_bos = files.add_bos
        if files.add_bos and self.bos_id is None:
            raise ModelError("tokenizer adds a bos token but names none", accepted="a bos_token in the tokenizer files")

    def _id_of(self, what: str, token: str | None) -> int | None:
        if token is None:
            return None
        found = self._backend.token_to_id(token)
        if found is None:
            raise ModelError(f"{what} is not in the vocabulary", found=token, accepted="a token of tokenizer.json")
        return found

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. With `add_special`, what the tokenizer adds around a prompt, and bos when its files ask
        for it; a text that begins with bos already does not get a second one."""
        return self._encoded(text, add_special)[0]

    def encode_with_offsets(self, text: str, add_special: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and their character ranges `[start, end)` in `text` (tokens that were added: `(0, 0)`)."""
        ids, encoding = self._encoded(text, add_special)
        offsets, more = encoding.offsets, len(ids) - len(encoding)
        return ids, [(0, 0), *offsets] if more > 0 else offsets[-more:]

    def _encoded(self, text: str, add_special: bool) -> tuple[list[int], tokenizers.Encoding]:
        """Token ids, and the encoding that they are of: they may have a bos more than that, or less."""
        # A batch, since only that lets other threads run: a long text takes seconds.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special)
        ids = encoding.ids
        if add_special and self.bos_id is not None:
            if ids[:2] == [self.bos_id] * 2 and encoding.offsets[0] == (0, 0) != encoding.offsets[1]:
                ids = ids[1:]
            elif self._add_bos and ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
        return ids, encoding

    def vocabulary(self) -> list[bytes]:
        """The bytes of every token by id; none for special tokens and ids without one. Takes a second or so."""
        return [b"" if id in self.special_ids else self.token_bytes(id) for id in range(self.vocab_size)]

    def special_within(self, tags: Iterable[str]) -> dict[str, int]:
        """The special tokens, by their text, that are a part of one of `tags`: an answer without them loses the tag."""
        tags = tuple(tags)
        texts = {self.token_text(id): id for id in self.special_ids}
        return {text: id for text, id in texts.items() if text and any(text in tag for tag in tags)}

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`. `continues`: the text goes on after a prompt, so SentencePiece's space before the first word
        stays. Ids without a token (padding rows of an embedding) have no text."""
        decoding = Decoding(self, skip_special=skip_special, continues=continues)
        return "".join([decoding.token(i) for i in ids]) + decoding.end()

    def token_text(self, id: int) -> str:
        """The vocabulary's own string of a token (`Ġthe`, `▁the`, `<0x0A>`); "" for an id without a token."""
        return self._backend.id_to_token(id) or ""

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for inside a text; empty for an id without a token."""
        return self._decoder.piece(self.token_text(id))

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary string such as `<|im_end|>`; None when there is none."""
        return self._backend.token_to_id(token)


class Decoding:
    """Incremental decode: `token(id)` gives the text that this token completes, `end()` what is left (as U+FFFD).

    Only complete UTF-8 leaves; the concatenation is the same whatever the pace. `keep`: special tokens that are text
    all the same.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool, continues: bool, keep: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer._decoder
        self._skip = tokenizer.special_ids - keep if skip_special else frozenset()
        self._first = not continues
        self._strip = 0 if continues else self._decoder.strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def token(self, id: int) -> str:
        if id in self._skip:
            return ""
        text = self._tokenizer.token_text(id)
        if not text:
            return ""
        piece = self._decoder.piece(text, self._first)
        self._first = False
        return self._stripped(self._utf8.decode(piece))

    def end(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] == self._decoder.strip_char:
                text = text[1:]
                self._strip -= 1
            else:
                self._strip = 0
        return text
