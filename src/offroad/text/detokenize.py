"""The text of one running sequence, piece by piece, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offroad.sample.params import SamplingParams
from offroad.text.tokenizer import Decoding, Tokenizer


@dataclass(frozen=True)
class Delta:
    """Text that may leave now. `stopped`: a stop string (`stop_reason`) has ended the text; nothing follows."""

    text: str
    stopped: bool = False
    stop_reason: str | None = None


class OutputStream:
    """Turns token ids into text deltas; what leaves is never taken back.

    Held back: bytes of an incomplete character, and text that may turn out to be the beginning of a stop string. The
    deltas add up to `tokenizer.decode(all ids)` when no stop string occurs. The stop string that is completed first
    ends the text (the longest, of several completed by the same character), so the result does not depend on how tokens
    are split over pushes. A stop string within the first `min_tokens` tokens does not count.

    `continues`: the text goes on after a raw prompt (completions), so SentencePiece's leading space is kept.
    `keep`: special tokens that stay in the text although the others are left out, since a parser looks for them. Stop
    strings apply to that text, before any parser: to thoughts and to calls of tools with their tags as well.
    `tokens_used`: tokens up to the one that completed the stop string; tokens after it are not looked at.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        continues: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._decoding = Decoding(tokenizer, skip_special=params.skip_special_tokens, continues=continues, keep=keep)
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._held = ""
        self._stop_reason: str | None = None
        self.tokens_used = 0

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Delta:
        """The text that `token_ids` release. `ends_with_stop_token`: the last one is the eos or stop id that finished
        the sequence; its text is left out unless `include_stop_str_in_output` asks for it."""
        out = []
        last = len(token_ids) - 1
        for i, id in enumerate(token_ids):
            if self._stop_reason is not None:
                break
            self.tokens_used += 1
            if ends_with_stop_token and i == last and not self._include:
                break
            out.append(self._take(self._decoding.token(id)))
        return self._delta(out)

    def finish(self) -> Delta:
        """What is left when the sequence has ended: an incomplete character as U+FFFD, then the held-back text."""
        if self._stop_reason is not None:
            return self._delta([])
        out = [self._take(self._decoding.end())]
        if self._stop_reason is None:
            out.append(self._held)
        self._held = ""
        return self._delta(out)

    def _delta(self, out: list[str]) -> Delta:
        return Delta("".join(out), self._stop_reason is not None, self._stop_reason)

    def _take(self, new: str) -> str:
        """Add text; returns what may leave."""
        if not self._stops or not new:
            return new
        text = self._held + new
        if self.tokens_used > self._min_tokens and (match := self._first_stop(text, len(self._held))):
            start, self._stop_reason = match
            self._held = ""
            return text[: start + len(self._stop_reason)] if self._include else text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, beyond the `old` characters searched already."""
        found = [(text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
