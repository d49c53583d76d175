"""The next turn of a chat resumes where the last one has left a checkpoint or a window, and the counters say so."""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace

import pytest

from offroad import LLM, SamplingParams
from offroad.serve.metrics import Metrics

BLOCK = 64
SYSTEM = {"role": "system", "content": "You are a machine that says letters. " * 3}
# A template that opens each answer with a long thought, which it leaves out of the history: a turn's prompt differs
# from what the turn before has run as soon as the user's part of that one ends.
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>" + "Let me see. " * 8 + "{% endif %}"
)


@pytest.fixture(scope="module", params=["gemma4_e", "qwen3_5"])
def folder(request, tiny):
    return tiny(request.param)[0]


@pytest.fixture
def llm(folder):
    return LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4)


def letters(llm: LLM, count: int) -> SamplingParams:
    """Answers of letters only, so that the text of an answer gives its tokens again."""
    bias = {token: 100.0 for token in llm.tokenizer.encode("bcdfgkmpqsvwxz")}
    return SamplingParams(temperature=0.8, seed=3, max_tokens=count, ignore_eos=True, logit_bias=bias)


def user(length: int) -> dict[str, str]:
    return {"role": "user", "content": ("What is next, please? " * 9)[:length]}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def counted(llm: LLM) -> tuple[int, int]:
    """(matched, resumed) tokens as `/metrics` tells them; the engine's own counters must agree."""
    stats = llm.engine.stats()
    lines = Metrics(SimpleNamespace(stats=stats, restarts=0)).text().decode().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = tuple(int(float(told[f"offroad_prefix_cache_{what}_tokens_total"])) for what in ("matched", "resumed"))
    assert found == (stats.prefix_matched_tokens, stats.prefix_resumed_tokens)
    return found


@pytest.mark.parametrize("asked", [10, 31, 60, 100, 180])
def test_the_second_turn_resumes_at_the_last_boundary_of_the_first(llm, asked):
    """Wherever the first turn's boundaries lie: in its prompt, or passed while it answered."""
    [first] = llm.chat([SYSTEM, user(asked)], letters(llm, 50))
    assert counted(llm) == (0, 0)
    answer = first.outputs[0]
    [second] = llm.chat([SYSTEM, user(asked), assistant(answer.text), user(30)], letters(llm, 5))
    run = first.prompt_token_ids + answer.token_ids[:-1]  # the last token has not been run
    assert second.prompt_token_ids[: len(run)] == run
    expected = len(run) // BLOCK * BLOCK
    assert second.usage.cached_tokens == expected > 0
    assert counted(llm) == (expected, expected)


def test_a_second_turn_without_the_first_one_s_thoughts_resumes_at_the_users_turn(folder):
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, chat_template=THINKING)
    history, resumed = [SYSTEM], []
    before: list[int] = []
    for turn in range(3):
        history.append(user(50 + 20 * turn))
        seen = counted(llm)
        [result] = llm.chat(history, letters(llm, 40))
        ids = result.prompt_token_ids
        known = common(ids, before)
        matched, cached = (now - then for now, then in zip(counted(llm), seen, strict=True))
        assert result.usage.cached_tokens == cached
        assert matched == known // BLOCK * BLOCK
        if before:
            assert ids[known - 1 : known] == llm.tokenizer.encode("<|assistant|>")
            assert cached == (known - 1) // BLOCK * BLOCK > 0
        resumed.append(cached)
        before = ids + result.outputs[0].token_ids
        history.append(assistant(f"think</think>{result.outputs[0].text}"))
    assert sorted(set(resumed)) == resumed, "each turn resumes further on than the one before"


def test_other_last_questions_resume_at_the_turn_before_and_then_where_they_part(llm):
    """All is read at once, as after a restart: only marks say which boundaries will be of use."""
    history = [SYSTEM, user(150), assistant("bcdfg" * 14)]
    [first] = llm.chat([*history, user(90)], letters(llm, 2))
    [second] = llm.chat([*history, {"role": "user", "content": "Or else " * 9}], letters(llm, 2))
    [third] = llm.chat([*history, {"role": "user", "content": "And now " * 9}], letters(llm, 2))
    a, b, c = (result.prompt_token_ids for result in (first, second, third))
    part, mark = common(a, b), a.index(llm.tokenizer.encode("<|assistant|>")[0])
    assert common(a, c) == part
    assert second.usage.cached_tokens == mark // BLOCK * BLOCK
    assert third.usage.cached_tokens == part // BLOCK * BLOCK > second.usage.cached_tokens > 0
    assert counted(llm) == (2 * third.usage.cached_tokens, second.usage.cached_tokens + third.usage.cached_tokens)
