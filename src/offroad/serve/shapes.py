"""The shapes of answers: OpenAI's objects for chat and completions, whole and in chunks."""

from __future__ import annotations

import time
from typing import Any

from offroad.schedule.request import TokenLogprobs
from offroad.serve.generation import CallDelta, Choice, Generation, Piece
from offroad.serve.text import TextLayer

# JSON has no infinity, and a filtered token has a log-probability of minus infinity.
_LEAST = -9999.0


class Shape:
    """What an answer has in both APIs. `ids` asks for token ids, `top` for that many log-probabilities (None: none) of
    the answer, `prompt_top` for those of the prompt."""

    def __init__(
        self,
        text: TextLayer,
        *,
        id: str,
        model: str,
        fingerprint: str,
        top: int | None,
        prompt_top: int | None,
        ids: bool,
    ) -> None:
        self.text, self.top, self.prompt_top, self.ids = text, top, prompt_top, ids
        self._head = {"id": id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    whole: str
    chunked: str

    def answer(self, generation: Generation) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        choices = [self._choice(i, choice, generation) for i, choice in enumerate(generation.choices)]
        body = {**self._head, "object": self.whole, "choices": choices, "usage": generation.usage()}
        if self.whole == "chat.completion":
            if self.ids:
                body["prompt_token_ids"] = generation.prompts[0].ids
            body |= self._prompt_logprobs(0, generation)
        return body | {"timings": generation.timings()}

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """Chunks that come before any token."""
        raise NotImplementedError

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The chunk of one piece; None: it says nothing yet."""
        raise NotImplementedError

    def usage_chunk(self, generation: Generation) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: no choices."""
        return self._chunk([], usage=generation.usage(), timings=generation.timings())

    def _choice(self, index: int, choice: Choice, generation: Generation) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self.chunked, "choices": choices, **more}

    def _end(self, thing: Choice | Piece) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": thing.finish_reason, "stop_reason": thing.stop_reason}
        return end | ({"token_ids": thing.token_ids} if self.ids else {})

    def _prompt_logprobs(self, prompt: int, generation: Generation) -> dict[str, Any]:
        """`prompt_logprobs` of vLLM: for each token of the prompt the log-probabilities by token id, None for the
        first."""
        if self.prompt_top is None:
            return {}
        ids, found = generation.prompts[prompt].ids, generation.prompt_logprobs.get(prompt, [])
        told: list[dict[str, Any] | None] = [None]
        for id, entry in zip(ids[1:], found, strict=False):
            ranked = {i: (rank, value) for rank, (i, value) in enumerate(entry.top[: self.prompt_top], 1)}
            told.append(
                {
                    str(i): {"logprob": max(value, _LEAST), "rank": rank, "decoded_token": self.text.token_text(i)}
                    for i, (rank, value) in ({id: (entry.rank, entry.logprob)} | ranked).items()
                }
            )
        return {"prompt_logprobs": told}

    def _best(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        return [(id, max(value, _LEAST)) for id, value in entry.top[: self.top]]


class ChatShape(Shape):
    """`chat.completion` and `chat.completion.chunk`."""

    whole, chunked = "chat.completion", "chat.completion.chunk"

    def __init__(self, text: TextLayer, *, thoughts: bool, **more: Any) -> None:
        """`thoughts`: whether those of the model are shown."""
        super().__init__(text, **more)
        self._thoughts = thoughts

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """The role of each choice; the first chunk also has the prompt's ids if they were asked for."""
        delta = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(generation.choices))
        ]
        if self.ids:
            chunks[0]["prompt_token_ids"] = generation.prompts[0].ids
        return chunks

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        delta: dict[str, Any] = self._reasoning(piece.reasoning)
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in piece.calls]
        if not delta and piece.finish_reason is None and self.top is None and not self.ids:
            return None
        logprobs = self._logprobs(piece.token_ids, piece.logprobs)
        return self._chunk([{"index": piece.index, "delta": delta, "logprobs": logprobs, **self._end(piece)}])

    def _choice(self, index: int, choice: Choice, generation: Generation) -> dict[str, Any]:
        # An answer that is nothing but calls has no content; one that is nothing but thoughts has an empty one.
        content = choice.content if choice.content or not choice.calls else None
        message = {"role": "assistant", "content": content, "refusal": None, **self._reasoning(choice.reasoning)}
        if choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        logprobs = self._logprobs(choice.token_ids, choice.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **self._end(choice)}

    def _reasoning(self, text: str) -> dict[str, Any]:
        """Thoughts under both names that clients look for."""
        return {"reasoning_content": text, "reasoning": text} if text and self._thoughts else {}

    @staticmethod
    def _call_delta(call: CallDelta) -> dict[str, Any]:
        function = {"arguments": call.arguments}
        if call.name is None:
            return {"index": call.index, "function": function}
        return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}

    def _logprobs(self, ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        content = [
            self._token(id, max(entry.logprob, _LEAST))
            | {"top_logprobs": [self._token(i, v) for i, v in self._best(entry)]}
            for id, entry in zip(ids, entries, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text.token_text(id), "logprob": logprob, "bytes": list(self.text.token_bytes(id))}


class CompletionShape(Shape):
    """`text_completion`. With `echo` each choice begins with its prompt's text."""

    whole = chunked = "text_completion"

    def __init__(self, text: TextLayer, *, echo: bool, **more: Any) -> None:
        super().__init__(text, **more)
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """The echoed prompts and the prompts' ids, where they were asked for."""
        if not (self._echo or self.ids):
            return []
        blank = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return [
            self._chunk(
                [
                    {
                        "index": i,
                        "text": self._prefix(choice, generation),
                        **blank,
                        **self._prompt_ids(choice, generation),
                    }
                ]
            )
            for i, choice in enumerate(generation.choices)
        ]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.index, piece.token_ids, piece.logprobs)
        return self._chunk([{"index": piece.index, "text": piece.text, "logprobs": logprobs, **self._end(piece)}])

    def _choice(self, index: int, choice: Choice, generation: Generation) -> dict[str, Any]:
        text, prompt = self._prefix(choice, generation) + choice.text, generation.prompts[choice.prompt].ids
        ids, entries = choice.token_ids, choice.logprobs
        if self._echo and self.top is not None:
            ids, entries = prompt + ids, [None, *generation.prompt_logprobs.get(choice.prompt, []), *entries]
        logprobs = self._logprobs(index, ids, entries)
        end = self._end(choice) | self._prompt_ids(choice, generation)
        end |= self._prompt_logprobs(choice.prompt, generation)
        return {"index": index, "text": text, "logprobs": logprobs, **end}

    def _prefix(self, choice: Choice, generation: Generation) -> str:
        if not self._echo:
            return ""
        prompt = generation.prompts[choice.prompt]
        return self.text.decode(prompt.ids) if prompt.text is None else prompt.text

    def _prompt_ids(self, choice: Choice, generation: Generation) -> dict[str, Any]:
        return {"prompt_token_ids": generation.prompts[choice.prompt].ids} if self.ids else {}

    def _logprobs(self, index: int, ids: list[int], entries: list[TokenLogprobs | None]) -> dict[str, Any] | None:
        """None in `entries`: a token that nothing foretells, the first of an echoed prompt."""
        if self.top is None:
            return None
        tokens, offsets = [self.text.token_text(id) for id in ids], []
        offset = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        chosen = [None if entry is None else max(entry.logprob, _LEAST) for entry in entries]
        best: list[dict[str, float] | None] = []
        for token, value, entry in zip(tokens, chosen, entries, strict=True):
            if entry is None or value is None:
                best.append(None)
                continue
            # Two ids may have the same text: the better one stays. The chosen token is always there.
            by_text: dict[str, float] = {}
            for id, logprob in self._best(entry):
                by_text.setdefault(self.text.token_text(id), logprob)
            by_text.setdefault(token, value)
            best.append(by_text)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}
