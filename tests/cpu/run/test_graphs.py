"""Graphs without CUDA: a recorder that runs the function again on the fixed buffers. Padding, buckets, same tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from offroad import LLM, SamplingParams
from offroad.errors import OffroadError
from offroad.ops.capture import GraphPlan
from offroad.run.graphs import Graphs

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True, presence_penalty=0.4)


class Replays:
    """Counts replays by rows and width."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}

    def __call__(self, body):
        number = len(self.count)
        self.count[number] = 0

        def replay() -> None:
            self.count[number] += 1
            body()

        return replay


def with_graphs(llm: LLM, rows: tuple[int, ...]) -> Replays:
    runner, replays = llm.engine.runner, Replays()
    widths = (1, runner.plan.k + 1) if runner.plan.k else (1,)
    plan = GraphPlan(rows, widths, "")
    runner.graphs = Graphs(plan, runner.model, runner.ops["decode"], runner.arrays, replays)
    return replays


def prompts() -> list[dict]:
    rng = random.Random(5)
    return [{"prompt_token_ids": [rng.randrange(3, 290) for _ in range(n)]} for n in (1, 63, 90, 20, 33)]


def with_drafts(llm: LLM, seed: int) -> None:
    """Random drafts of random number behind every token, most of them wrong."""
    arrays, rng = llm.engine.runner.arrays, random.Random(seed)
    draft, few = arrays.draft, [7, 8, 9]

    def some(slot: int, ids: np.ndarray) -> None:
        draft(slot, np.array([rng.choice(few) for _ in range(rng.randrange(arrays.k + 1))], np.int64))

    arrays.draft = some


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4_e"])
def test_graphs_give_the_tokens_of_eager_steps(family: str, drafts: bool, tiny):
    folder, _ = tiny(family)
    settings = dict(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=48)
    settings |= dict(speculative_config=DRAFTS) if drafts else {}
    eager, graphed = LLM(str(folder), **settings), LLM(str(folder), **settings)
    replays = with_graphs(graphed, (1, 3, 4))
    if drafts:
        with_drafts(graphed, 3)
    for params in (GREEDY, SAMPLED):
        expected, found = (llm.generate(prompts(), params) for llm in (eager, graphed))
        assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]
    graphed.engine.check()
    assert len(replays.count) == (6 if drafts else 3)
    assert all(list(replays.count.values())[:3]), replays.count  # the widest come first


def test_rows_that_are_left_over_write_to_the_bin_alone(tiny):
    folder, _ = tiny("qwen3_5")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4)
    with_graphs(llm, (4,))
    runner = llm.engine.runner
    seen = []
    [graph] = runner.graphs.graphs.values()
    forward, model = runner.model.forward, runner.model

    def look(rows, ops):
        seen.append((rows.slot_t.tolist(), rows.start_t.tolist(), rows.width_t.tolist(), rows.offset_t.tolist()))
        return forward(rows, ops)

    model.forward = look
    tables = {t: table.clone() for t, table in runner.arrays.tables.items()}
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    steps = [entry for entry in seen if len(entry[0]) == 4]
    slot = steps[0][0][0]
    assert steps == [([slot, 0, 0, 0], [start, 0, 0, 0], [1, 0, 0, 0], [0, 1, 2, 3]) for start in (3, 4)]
    assert slot > 0
    assert all((runner.arrays.tables[t][0] == tables[t][0]).all() for t in tables)
    assert graph.tokens == 4


def test_a_broken_row_ends_alone(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4)
    with_graphs(llm, (4,))
    runner = llm.engine.runner
    forward, calls = runner.model.forward, []

    def spoilt(rows, ops):
        hidden = forward(rows, ops)
        if len(rows.slot) == 4:
            calls.append(rows)
            if len(calls) == 5:
                hidden[1] = torch.nan
        return hidden

    runner.model.forward = spoilt
    results = llm.generate(prompts()[:3], GREEDY)
    assert [r.outputs[0].finish_reason for r in results].count("error") == 1
    assert [r.outputs[0].finish_reason for r in results].count("length") == 2


def test_what_cannot_be_captured_is_told(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    runner = llm.engine.runner

    def refuse(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(OffroadError, match="enforce-eager"):
        Graphs(GraphPlan((1,), (1,)), runner.model, runner.ops["decode"], runner.arrays, refuse)


def test_steps_with_chunks_and_larger_ones_run_eagerly(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4)
    replays = with_graphs(llm, (1,))
    llm.generate(prompts()[:4], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert replays.count == {0: 0}
    llm.generate(prompts()[:1], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert replays.count == {0: 4}
    assert np.isfinite(llm.engine.runner.graphs.logits[:1].numpy()).all()
