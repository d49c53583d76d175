"""Grammars over a vocabulary by xgrammar, which is optional: compiled once, then matched by each sequence apart."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from offroad.errors import RequestError
from offroad.sample.guide import MAX_CHARS, Grammar
from offroad.sample.guided import TOO_SLOW, Matcher
from offroad.weights.source import TokenizerFiles

_KEPT = 64  # compiled grammars
# A grammar whose tokens cost more of the engine's time than this, on average of the latest, is not followed any more.
# Usual ones take less than a millisecond; `((a{1,99}){1,99}){1,99}` takes more with each token, and soon seconds.
_SLOW_SECONDS, _LATEST = 0.02, 32
_BLANKS = 40  # the most between two parts of JSON: a model may else say nothing but blanks for ever


class Grammars:
    """Compiled grammars over the `vocab` tokens of a model, the latest ones kept. Made at once; unless it is told, the
    vocabulary is read from `files` when the first grammar comes. May be called from several threads."""

    def __init__(self, files: TokenizerFiles, vocab: int) -> None:
        self._files, self._vocab = files, vocab
        self._lock = threading.Lock()
        self._table: tuple[list[bytes], tuple[int, ...]] | None = None
        self._compiler: Any = None
        self._compiled: OrderedDict[Grammar, tuple[Any, Cost]] = OrderedDict()

    def teach(self, tokens: list[bytes], ends: tuple[int, ...]) -> None:
        """Tells the bytes of each token (none: it is in no language), and which ones end a sequence."""
        with self._lock:
            self._table = tokens, ends

    def compile(self, grammar: Grammar, param: str = "structured_outputs") -> Any:
        """The compiled grammar. Raises RequestError (`param`): xgrammar is missing, or the grammar is not one, or was
        too slow before."""
        compiled, cost = self._get(grammar, param)
        if cost.slow:
            raise RequestError(
                f"{param} cannot be used", param=param, code="invalid_grammar", found=TOO_SLOW, next="make it simpler"
            )
        return compiled

    def _get(self, grammar: Grammar, param: str) -> tuple[Any, Cost]:
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        if len(grammar.text) > MAX_CHARS:
            accepted = f"at most {MAX_CHARS}"
            raise RequestError(param, param=param, found=f"{len(grammar.text)} characters", accepted=accepted)
        compiler = self._ready(param)
        try:
            made = _compile(compiler, grammar)
        except Exception as error:  # the library raises bare RuntimeError for what it cannot read
            found = str(error).strip().split(": ", 1)[-1][:300]
            accepted = f"a {grammar.kind} that can be followed"
            raise RequestError(
                f"{param} cannot be used", param=param, code="invalid_grammar", found=found, accepted=accepted
            ) from error
        with self._lock:
            self._compiled[grammar] = made, (cost := Cost())
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return made, cost

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a grammar."""
        import xgrammar

        compiled, cost = self._get(grammar, "structured_outputs")
        return XMatcher(xgrammar.GrammarMatcher(compiled), cost)

    def _ready(self, param: str) -> Any:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._made(param)
            return self._compiler

    def _made(self, param: str) -> Any:
        """A compiler over the vocabulary."""
        try:
            import xgrammar
        except ImportError as error:
            raise RequestError(
                f"{param} needs xgrammar",
                param=param,
                code="unsupported_field",
                found="a server without it",
                next="install offroad[grammar]",
            ) from error
        from offroad.text.tokenizer import Tokenizer

        if self._table is None:
            tokenizer = Tokenizer(self._files)
            self._table = tokenizer.vocabulary(), tokenizer.eos_ids
        tokens, ends = self._table
        ids = [id for id in ends if id < self._vocab]
        table = tokens[: self._vocab]
        info = xgrammar.TokenizerInfo(table, xgrammar.VocabType.RAW, vocab_size=self._vocab, stop_token_ids=ids)
        return xgrammar.GrammarCompiler(info, max_threads=1)


class Cost:
    """What following a grammar takes of the engine's thread, over all sequences that follow it."""

    def __init__(self) -> None:
        self._mean = 0.0  # CPU seconds a call, a running mean of the latest: other programs do not count
        self.slow = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what is done within; `slow` is set when the mean is too high, for good."""
        began = time.thread_time()
        yield
        self._mean += (time.thread_time() - began - self._mean) / _LATEST
        self.slow = self.slow or self._mean > _SLOW_SECONDS


class XMatcher:
    """xgrammar's matcher. Behind the end of the language everything is allowed: the sequence has ended. So it is when
    the grammar is too slow: the sequence will be ended."""

    def __init__(self, matcher: Any, cost: Cost) -> None:
        self._matcher, self._cost = matcher, cost
        self._beyond = 0  # tokens taken behind the end

    @property
    def slow(self) -> bool:
        return self._cost.slow

    def fill(self, mask: np.ndarray) -> None:
        if self.slow or self._matcher.is_terminated():
            mask[:] = -1
            return
        with self._cost.counted():
            if not self._matcher.fill_next_token_bitmask(mask[None]):
                mask[:] = -1  # it says that nothing is excluded, and leaves the mask

    def accept(self, token: int) -> bool:
        if self.slow or self._matcher.is_terminated():
            self._beyond += 1
            return True
        with self._cost.counted():
            return self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        behind = min(count, self._beyond)
        self._beyond -= behind
        if count > behind:
            self._matcher.rollback(count - behind)


def _compile(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind == "json_schema":
        return compiler.compile_json_schema(grammar.text, max_whitespace_cnt=_BLANKS)
    if grammar.kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=_BLANKS)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    return compiler.compile_grammar(grammar.text)
