"""Grammars that would hold up the engine are given up after a while, whatever they are; usual ones never are."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from offroad.errors import RequestError
from offroad.sample.grammar import Grammars
from offroad.sample.guide import Grammar
from offroad.sample.guided import words
from offroad.weights.source import TokenizerFiles

xgrammar = pytest.importorskip("xgrammar")
EOS = 256
# Long words behind each letter: what a large vocabulary costs.
TOKENS = [*(bytes([i]) for i in range(256)), b"", *(b"%c%d" % (97 + i % 26, i) for i in range(3000))]


def grammars() -> Grammars:
    made = Grammars(TokenizerFiles("{}", None, None, None, (EOS,), False, {}), len(TOKENS))
    made.teach(TOKENS, (EOS,))
    return made


def follow(made: Grammars, grammar: Grammar, text: bytes) -> tuple[bool, float]:
    """Whether it was given up on the way along `text`, and the CPU seconds that it took."""
    matcher, mask, began = made.matcher(grammar), np.zeros(words(len(TOKENS)), np.int32), time.thread_time()
    for token in text:
        matcher.fill(mask)
        assert matcher.accept(token)
        if matcher.slow:
            break
    return matcher.slow, time.thread_time() - began


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "((((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}"),
        Grammar("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
        Grammar("json_schema", json.dumps({"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99})$"})),
    ],
)
def test_pathological_repetitions(grammar):
    made = grammars()
    made.compile(grammar)
    text = b'"' + b"a" * 300 if grammar.kind == "json_schema" else b"a" * 300
    slow, seconds = follow(made, grammar, text)
    assert slow
    assert seconds < 5
    with pytest.raises(RequestError, match="too long"):
        made.compile(grammar)
    # Sequences that were on their way to it are given up at once.
    assert follow(made, grammar, b"a")[0]


def test_usual_grammars_are_followed():
    made = grammars()
    schema = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(30)}, "required": ["k0"]}
    value = json.dumps({f"k{i}": "some words" for i in range(30)}).encode()
    for _ in range(3):
        assert follow(made, Grammar("json_schema", json.dumps(schema)), value) == (False, pytest.approx(0, abs=2))
    assert not follow(made, Grammar("regex", "(a|aa|b)*"), b"ab" * 200)[0]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("ebnf", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
        Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("ebnf", "root ::= nothing"),
        Grammar("regex", "a{1000000000000}"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammar):
    with pytest.raises(RequestError) as refused:
        grammars().compile(grammar)
    assert refused.value.code == "invalid_grammar"
