"""Answers in a language: the same with drafts and without, alone and in a batch, preempted, resumed, by graphs."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from engine_runs import Session, engine_of, run
from test_graphs import Replays

from offroad.engine import Engine
from offroad.errors import RequestError
from offroad.ops.capture import GraphPlan
from offroad.run.graphs import Graphs
from offroad.sample.grammar import Grammars
from offroad.sample.guide import Grammar, Guide, Thinking
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.text.tokenizer import Tokenizer

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
JSON = Guide(Grammar("json_schema", json.dumps(SCHEMA)))
DIGITS = Guide(Grammar("regex", "([0-9]{3}-)+[ab]"))
CHOICE = Guide(Grammar("ebnf", 'root ::= "yes" | "no" | "perhaps"'))
EOS = 2
END = 70  # stands for the token that ends thoughts
THINK = Guide(CHOICE.grammar, Thinking(END, opened=True, budget=9))
BUDGET = Guide(thinking=Thinking(END, opened=True, budget=4))
GUIDES = [JSON, None, DIGITS, THINK, None, CHOICE, BUDGET, JSON]


def requests(temperature: float) -> list[Request]:
    rng = random.Random(5)
    made = []
    for i, guide in enumerate(GUIDES):
        # Most prompts quote what the grammar wants, so that there is something to draft.
        ids = [rng.randrange(3, 290) for _ in range(5 + 17 * i)] + [rng.choice([20, 21, 22, 23]) for _ in range(12)]
        params = SamplingParams(
            temperature=temperature,
            max_tokens=36,
            logit_bias={i: -8.0 for i in (199, 200, 203, 222)},
        )
        made.append(Request(id=str(i), prompt_ids=ids, params=params, seed=i, eos_ids=(EOS,), guide=guide))
    return made


def spoken(engine: Engine, ids: list[int]) -> str:
    return Tokenizer(engine.source_tokenizer).decode(ids)


def tokens_of(answers) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def preempted(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    """Answers while the youngest sequence has to begin again every few steps."""
    session, steps, scheduler = Session(engine), 0, engine.scheduler
    for request in asked:
        session.submit(request)
    while engine.has_work():
        session.step()
        steps += 1
        if steps % 7 == 0 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[-1])
    restarts = [name for name, answer in session.answers.items() for _ in answer.restarts]
    assert {r.id for r in asked if r.guide is not None} & set(restarts), "nothing was preempted while it spoke"
    return tokens_of(session.answers)


def alone(engine: Engine, temperature: float) -> dict[str, list[int]]:
    return {r.id: run(engine, [r])[r.id].tokens for r in requests(temperature)}


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("llama", 0.9), ("qwen3_5", 0.9)])
def test_the_same_whatever_happens_around_it(family: str, temperature: float, tiny):
    folder, _ = tiny(family)
    plain = engine_of(folder, max_num_seqs=1)
    drafting = engine_of(folder, max_num_seqs=8, max_num_batched_tokens=48, speculative_config=DRAFTS)
    batched = engine_of(folder, max_num_seqs=8, max_num_batched_tokens=48)
    ahead = engine_of(folder, max_num_seqs=8, max_num_batched_tokens=48)  # as on a GPU: a step is built before the last
    ahead.plan = replace(ahead.plan, depth=2)  # one's tokens are known
    ahead.scheduler.depth = 2
    expected = alone(plain, temperature)
    assert tokens_of(run(batched, requests(temperature), later=5)) == expected
    assert tokens_of(run(batched, requests(temperature))) == expected  # over prefix hits
    assert tokens_of(run(ahead, requests(temperature), later=3)) == expected
    assert preempted(ahead, requests(temperature)) == expected
    assert preempted(batched, requests(temperature)) == expected
    assert tokens_of(run(drafting, requests(temperature))) == expected
    stats = drafting.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    for engine in (plain, drafting, batched, ahead):
        engine.check()


def test_answers_are_in_their_language(tiny):
    folder, _ = tiny("llama")
    engine = engine_of(folder, max_num_seqs=8)
    found = run(engine, requests(0.9))
    said = {name: (answer.tokens, spoken(engine, answer.tokens), answer.ended) for name, answer in found.items()}
    assert re.fullmatch(r"([0-9]{3}-)*([0-9]{0,3}|[ab])", said["2"][1])
    assert said["5"][1] in ("yes", "no", "perhaps")
    assert said["5"][0][-1] == EOS
    thoughts, answer = said["3"][0][:10], said["3"][0][10:]
    assert thoughts.index(END) <= 9
    if thoughts.index(END) == 9:
        assert spoken(engine, answer) in ("yes", "no", "perhaps")
    assert END in said["6"][0][:5]
    for name in ("0", "7"):
        _, text, ended = said[name]
        if ended == "stop":
            assert set(json.loads(text)) == {"a", "b", "c"}
        else:
            assert text.lstrip().startswith("{")


def test_no_row_of_others_is_touched(tiny):
    folder, _ = tiny("llama")
    free = [r for r in requests(0.9) if r.guide is None]
    engine = engine_of(folder, max_num_seqs=8)
    expected = tokens_of(run(engine, free))
    found = tokens_of(run(engine, requests(0.9)))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("drafts", [False, True])
def test_graphs(drafts: bool, tiny):
    folder, _ = tiny("llama")
    more = {"speculative_config": DRAFTS} if drafts else {}
    eager = engine_of(folder, max_num_seqs=8, **more)
    graphed = engine_of(folder, max_num_seqs=8, **more)
    runner, replays = graphed.runner, Replays()
    plan = GraphPlan((1, 4, 8), (1, runner.plan.k + 1) if drafts else (1,), "")
    runner.graphs = Graphs(plan, runner.model, runner.ops["decode"], runner.arrays, replays)
    assert tokens_of(run(graphed, requests(0.0))) == tokens_of(run(eager, requests(0.0)))
    assert sum(replays.count.values())


def test_a_grammar_that_is_given_up_ends_nobody_else(tiny):
    """Who got the slot of a sequence that followed it, but has not had a step yet, follows nothing."""
    folder, _ = tiny("llama")
    engine = engine_of(folder, max_num_seqs=2, max_num_batched_tokens=2)
    [short, free, going] = (
        Request(
            id=name, prompt_ids=[5, 6], params=SamplingParams(max_tokens=count), seed=3, eos_ids=(EOS,), guide=guide
        )
        for name, count, guide in (("short", 1, DIGITS), ("free", 4, None), ("going", 30, DIGITS))
    )
    expected = run(engine, [free])["free"].tokens
    session = Session(engine)
    session.submit(going)
    session.submit(short)
    while not session.answers["short"].ended:
        session.step()
    [other] = set(range(1, 3)) - {engine.scheduler.running[0].slot}
    assert other in engine.guides._by_slot
    engine.scheduler.max_chunk = 0  # no room for a chunk in the next step
    session.submit(free)
    engine.grammars._compiled[DIGITS.grammar][1].slow = True
    refused = {event.request_id: event.finish_reason for event in engine.step()} | {
        event.request_id: event.finish_reason for event in engine.scheduler.drain_events()
    }
    assert refused == {"going": "refused"}
    engine.scheduler.max_chunk = 2
    session.finish()
    assert session.answers["free"].tokens == expected


def test_what_is_no_grammar_is_refused(tiny):
    folder, _ = tiny("llama")
    engine = engine_of(folder)
    bad = [("json_schema", '{"type": "objet"}'), ("json_schema", "["), ("regex", "(a"), ("ebnf", 'root ::= "a" x')]
    bad += [("json_schema", '{"$ref": "#/nowhere"}'), ("regex", "a" * 200_000)]
    for kind, text in bad:
        guide = Guide(Grammar(kind, text), param="response_format")
        request = Request(id="x", prompt_ids=[5], params=SamplingParams(), guide=guide)
        with pytest.raises(RequestError) as refused:
            engine.submit(request)
        assert refused.value.param == "response_format"
    engine.check()


def test_without_xgrammar_the_extra_is_named(tiny, monkeypatch):
    folder, _ = tiny("llama")
    engine = engine_of(folder)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"offroad\[grammar\]"):
        Grammars(engine.source_tokenizer, 300).compile(JSON.grammar, "response_format")
    # A budget of thoughts needs none.
    request = Request(id="x", prompt_ids=[5, 6], params=SamplingParams(max_tokens=8), eos_ids=(EOS,), guide=BUDGET)
    assert END in run(engine, [request])["x"].tokens[:5]
