"""Every tool parser on the table of answers: what is in them, however they are cut, and at whatever place they end."""

from __future__ import annotations

import json
from os.path import commonprefix

import pytest
from golden_calls import GOLDEN, TOOLS

from offroad.text.tools.registry import TOOL_PARSERS, make_tool_parser

CASES = [pytest.param(name, *case, id=f"{name}-{i}") for name, table in GOLDEN.items() for i, case in enumerate(table)]


def told(name: str, pieces: list[str], cut: bool = False) -> tuple[str, list[list[str]], int]:
    """(content, [name, arguments] of each call, how many are complete)."""
    parser = make_tool_parser(name, TOOLS)
    content, calls = "", []
    for said in [*map(parser.feed, pieces), parser.finish(cut)]:
        content += said.content
        for piece in said.calls:
            if piece.index == len(calls):
                assert piece.name is not None
                calls.append([piece.name, ""])
            else:
                assert (piece.name, piece.index) == (None, len(calls) - 1)
            calls[-1][1] += piece.arguments
    return content, calls, parser.complete


def test_every_parser_has_thirty_answers():
    assert GOLDEN.keys() == TOOL_PARSERS.keys()
    for name, table in GOLDEN.items():
        assert len({case[0] for case in table}) >= 30, name


@pytest.mark.parametrize(("name", "answer", "content", "calls"), CASES)
def test_what_is_in_an_answer(name, answer, content, calls):
    found, made, complete = told(name, [answer])
    assert (found, [(function, json.loads(arguments)) for function, arguments in made]) == (content, calls)
    assert complete == len(calls)
    for size in (1, 2, 7):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert told(name, pieces) == (found, made, complete)


@pytest.mark.parametrize(("name", "answer", "content", "calls"), CASES)
def test_an_answer_that_ends_anywhere(name, answer, content, calls):
    """Nothing is lost or made up: what came back as content is of the whole answer's content, then the end as it was
    said; calls are the first ones of the whole answer, the last perhaps cut."""
    full, made, _ = told(name, [answer])
    step = 1 if len(answer) < 1000 else 97
    for end in range(0, len(answer), step):
        part = answer[:end]
        found, calls, complete = told(name, [part], cut=True)
        if not calls:
            assert found == part
            continue
        same = commonprefix([full, found])
        assert part.endswith(found[len(same) :]), (part, found)
        assert complete <= len(calls) <= complete + 1
        if not made:
            continue  # what comes later is why the whole cannot be read
        assert len(calls) <= len(made)
        for i, ((function, arguments), (whole, all)) in enumerate(zip(calls, made, strict=False)):
            assert function == whole
            assert arguments == all if i < complete else all.startswith(arguments)
        for function, arguments in told(name, [part])[1]:  # it has ended by itself there: calls can be read
            assert function
            assert isinstance(json.loads(arguments), dict)
