"""Prompts that come while others decode, with graphs of both kinds of steps, without CUDA: same tokens, states and keys
as from eager steps that all rows share, and no step is eager that a graph can run."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from engine_runs import ask, assert_same, engine_of, run, tokens

from offroad import engine as engine_module
from offroad.engine import Engine
from offroad.ops.capture import GraphPlan
from offroad.run.chunk_graphs import ChunkGraphs
from offroad.run.graphs import Graphs
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.schedule.step import Kind, Step
from offroad.schedule.turns import Turns

SIZES = (4, 16, 48)
SETTINGS = dict(max_num_seqs=4, max_num_batched_tokens=64)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


@dataclass
class Steps:
    """The steps of an engine: what their rows do, and whether a graph has run them."""

    kinds: list[set[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)

    @property
    def shared(self) -> list[int]:
        """Numbers of the steps in which some rows decode beside chunks."""
        return [number for number, kinds in enumerate(self.kinds) if len(kinds) > 1]


def with_graphs(engine: Engine) -> Steps:
    """Graphs of every decode step and of chunks of up to 48 tokens, which take turns."""
    runner, steps = engine.runner, Steps()
    launch, plan = runner.launch, GraphPlan((1, 4), (1, runner.plan.k + 1) if runner.plan.k else (1,), "", chunks=SIZES)

    def recorder(body):
        def replay() -> None:
            steps.replays[-1] += 1
            body()

        return replay

    def noting(step: Step) -> None:
        steps.kinds.append(set(step.kind.tolist()))
        steps.tokens.append(int(step.width.sum()))
        steps.replays.append(0)
        launch(step)

    runner.graphs = Graphs(plan, runner.model, runner.ops["decode"], runner.arrays, recorder)
    runner.chunk_graphs = ChunkGraphs(SIZES, runner.model, runner.ops["prefill"], runner.arrays, recorder)
    runner.launch, engine.scheduler.turns = noting, Turns(SIZES[-1])
    return steps


def test_a_closed_engine_leaves_nothing_behind(tiny):
    """Nor does it wait for the garbage collector, before whose next turn another engine may want the memory."""
    engine = engine_of(tiny("llama")[0], **SETTINGS)
    with_graphs(engine)
    runner = weakref.ref(engine.runner)
    engine.close()
    assert runner() is None


def requests() -> list[Request]:
    """Three that decode for long, then prompts of some tokens, a long one, and one whose beginning is known."""
    long = [ask(f"long {i}", tokens(f"long {i}", 5 + i), 40, temperature=0.4 * i) for i in range(3)]
    short = [ask(f"short {n}", tokens(f"short {n}", n), 2, temperature=0.3 * (n % 3)) for n in (9, 1, 48, 33, 150, 4)]
    known = [ask("known", tokens("short 150", 150) + tokens("more", 7), 2)]
    return [*long, *short, *known]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gemma4_e"])
def test_same_answers_as_steps_that_all_rows_share(family: str, depth: int, tiny, monkeypatch):
    folder, _ = tiny(family)
    expected = run(engine_of(folder, **SETTINGS), requests(), later=7)
    planned = engine_module._plan
    monkeypatch.setattr(engine_module, "_plan", lambda *given: replace(planned(*given), depth=depth))
    graphed = engine_of(folder, **SETTINGS)
    steps = with_graphs(graphed)
    found = run(graphed, requests(), later=7)
    assert_same(found, expected)
    assert found["known"].cached == expected["known"].cached > 0
    eager = [number for number, replays in enumerate(steps.replays) if not replays]
    assert all(steps.tokens[number] > SIZES[-1] or number == 0 for number in eager), "0: three prompts at once"
    alone = [number for number, kinds in enumerate(steps.kinds) if kinds == {Kind.CHUNK} and number > 0]
    assert len(alone) >= 7
    assert all(steps.kinds[number + 1] == {Kind.VERIFY} for number in alone[:-1])


def with_drafts(engine: Engine, texts: list[list[int]]) -> None:
    """Drafts are what comes next in the text, and often something else in the end."""
    arrays, dice = engine.runner.arrays, random.Random(3)
    draft = arrays.draft

    def some(slot: int, ids: np.ndarray) -> None:
        known = arrays.known(slot).tolist()
        text = next(text for text in texts if text[: len(known)] == known)
        drafts = text[len(known) :][: dice.randrange(arrays.k + 1)]
        if drafts and dice.random() < 0.5:
            drafts[-1] = 5
        draft(slot, np.array(drafts, np.int64))

    arrays.draft = some


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_drafts_stay_while_their_rows_sit_out(family: str, tiny):
    folder, _ = tiny(family)
    asked = [ask(f"long {i}", tokens(f"long {i}", 6), 30, temperature=0.5 * i) for i in range(2)]
    asked += [ask(f"short {n}", tokens(f"short {n}", n), 3) for n in (9, 20, 25)]
    expected = run(engine_of(folder, **SETTINGS), asked, later=3)
    graphed = engine_of(folder, **SETTINGS, speculative_config=DRAFTS)
    steps = with_graphs(graphed)
    with_drafts(graphed, [request.prompt_ids + expected[request.id].tokens for request in asked])
    found = run(graphed, asked, later=3)
    assert {name: found[name].tokens for name in found} == {name: expected[name].tokens for name in expected}
    stats = graphed.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert sum(kinds == {Kind.CHUNK} for kinds in steps.kinds) >= 3
    assert not steps.shared


def test_what_no_graph_runs_shares_a_step(tiny):
    """A prompt that is scored, beside rows that decode."""
    folder, _ = tiny("llama")
    engine = engine_of(folder, **SETTINGS)
    steps = with_graphs(engine)
    scored = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    run(
        engine, [ask("long", tokens("long", 5), 12), Request(id="x", prompt_ids=tokens("x", 9), params=scored)], later=1
    )
    assert len(steps.shared) == 1
    assert [steps.replays[number] for number in steps.shared] == [0]
