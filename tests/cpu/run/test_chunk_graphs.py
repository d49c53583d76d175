"""Graphs of one chunk without CUDA: a recorder runs the function again on the fixed buffers. Same tokens as eager steps
for every length around a size's end, dead tokens that change nothing, and what stays eager."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad import LLM, SamplingParams
from offroad.errors import OffroadError
from offroad.ops.capture import GraphPlan
from offroad.run.chunk_graphs import ChunkGraphs

SIZES = (4, 16, 48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=4, ignore_eos=True, presence_penalty=0.4, logprobs=2)
FAMILIES = ("llama", "gemma3", "qwen3_5", "qwen3_5_moe", "gemma4_e")


class Replays:
    """Counts replays by size."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.sizes = iter(sorted(SIZES, reverse=True))

    def __call__(self, body):
        size = next(self.sizes)
        self.count[size] = 0

        def replay() -> None:
            self.count[size] += 1
            body()

        return replay


def with_graphs(llm: LLM) -> Replays:
    runner, replays = llm.engine.runner, Replays()
    runner.chunk_graphs = ChunkGraphs(SIZES, runner.model, runner.ops["prefill"], runner.arrays, replays)
    return replays


def prompt(length: int, seed: int = 5) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 290) for _ in range(length)]


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """One after the other, so that each is a step of its own."""
    found = [llm.generate([{"prompt_token_ids": ids}], params)[0].outputs[0] for ids in prompts]
    assert all(out.finish_reason == "length" for out in found)
    return [out.token_ids for out in found]


def pair(folder, **more) -> tuple[LLM, LLM, Replays]:
    settings = dict(device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=96, seed=1) | more
    eager, graphed = LLM(str(folder), **settings), LLM(str(folder), **settings)
    return eager, graphed, with_graphs(graphed)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_gives_the_tokens_of_eager_steps(family: str, tiny):
    folder, _ = tiny(family)
    kernels = ("attention=torch.reference_attention",) if family in ("llama", "gemma4_e") else ()
    eager, graphed, replays = pair(folder, kernel=kernels, allow_reference=bool(kernels))
    prompts = [prompt(n, n) for n in (1, 4, 5, 16, 17, 47, 48, 49, 97, 144, 145)]
    for params, some in ((GREEDY, prompts), (SAMPLED, prompts[1:5])):
        assert answers(graphed, some, params) == answers(eager, some, params)
    graphed.engine.check()
    assert all(replays.count.values()), replays.count
    assert sum(replays.count.values()) >= 13  # those of 49, and the first 96 of longer prompts, are eager


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_a_chat_resume_from_the_prefix_cache(family: str, tiny):
    """Each turn is a short chunk behind tokens that are in the caches."""
    folder, _ = tiny(family)
    eager, graphed, replays = pair(folder, max_num_batched_tokens=64)
    texts: list[list[int]] = [[], []]
    for turn, length in enumerate((70, 9, 40, 60, 3, 30)):
        for i, llm in enumerate((eager, graphed)):
            texts[i] += prompt(length, turn)
            texts[i] += answers(llm, [texts[i]], GREEDY)[0]
        assert texts[0] == texts[1]
    assert graphed.engine.stats().prefix_resumed_tokens > 200
    assert sum(replays.count.values()) >= 4
    graphed.engine.check()


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4_e"])
def test_drafts_of_a_prompt_s_words_change_nothing(family: str, tiny):
    folder, _ = tiny(family)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    eager, graphed, replays = pair(folder, speculative_config=drafts)
    prompts = [[7, 8, 9, 10] * 9, prompt(20), [11, 12, 13] * 5]
    for params in (GREEDY, SAMPLED):
        assert answers(graphed, prompts, params) == answers(eager, prompts, params)
    assert sum(replays.count.values()) == 2 * len(prompts)


@pytest.fixture(scope="module")
def couple(tiny) -> tuple[LLM, LLM]:
    folder, _ = tiny("qwen3_5")
    return pair(folder, max_num_batched_tokens=40)[:2]


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4), seed=st.integers(0, 3), together=st.booleans())
def test_any_prompts_alone_or_together(couple, lengths: list[int], seed: int, together: bool):
    prompts = [{"prompt_token_ids": prompt(n, seed)} for n in lengths]  # each the beginning of a longer one
    groups = [prompts] if together else [[one] for one in prompts]
    found = [[[r.outputs[0].token_ids for r in llm.generate(group, GREEDY)] for group in groups] for llm in couple]
    assert found[0] == found[1]


def test_what_stands_behind_the_chunk_is_never_read(tiny):
    """Dead tokens are given ids at random and, where the model embeds them, NaN."""
    folder, _ = tiny("qwen3_5")
    eager, graphed, _ = pair(folder, enable_prefix_caching=False)
    runner = graphed.engine.runner
    forward, widths = runner.model.forward, []

    def poisoned(rows, ops):
        if rows.verify or rows.tokens not in SIZES:
            return forward(rows, ops)
        width = int(rows.width_t[0])
        widths.append((width, rows.tokens))
        rows.ids[width:] = torch.randint(3, 290, rows.ids[width:].shape)
        embed = ops.embed

        class Poisoned:
            def __getattr__(self, name):
                return getattr(ops, name)

            def embed(self, ids):
                found = embed(ids)
                found[width:] = torch.nan
                return found

        return forward(rows, Poisoned())

    runner.model.forward = poisoned
    prompts = [prompt(n, n) for n in (1, 5, 16, 17, 30)]
    assert answers(graphed, prompts, GREEDY) == answers(eager, prompts, GREEDY)
    assert sorted(widths) == [(1, 4), (5, 16), (16, 16), (17, 48), (30, 48)]


def test_a_chunk_in_the_middle_of_a_prompt_leaves_the_known_tokens(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2, max_num_batched_tokens=16)
    replays, arrays, ids = with_graphs(llm), llm.engine.runner.arrays, prompt(40)
    answer = answers(llm, [ids], GREEDY)[0]
    assert replays.count == {48: 0, 16: 3, 4: 0}  # 16, 16 and 8 tokens
    found = [row[: len(ids) + len(answer)].tolist() for row in arrays.tokens]
    assert ids + answer in found


def test_a_chunk_with_a_value_that_is_not_finite_ends_its_sequence(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    with_graphs(llm)
    model = llm.engine.runner.model
    forward = model.forward

    def spoilt(rows, ops):
        return forward(rows, ops) * (torch.nan if rows.tokens in SIZES else 1)

    model.forward = spoilt
    [result] = llm.generate([{"prompt_token_ids": prompt(9)}], GREEDY)
    assert result.outputs[0].finish_reason == "error"
    model.forward = forward
    assert len(answers(llm, [prompt(9)], GREEDY)[0]) == 4


def test_prompt_scores_and_several_rows_stay_eager(tiny):
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=3, enable_prefix_caching=False)
    replays = with_graphs(llm)
    scored = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    llm.generate([{"prompt_token_ids": prompt(9)}], scored)
    llm.generate([{"prompt_token_ids": prompt(n)} for n in (5, 6)], GREEDY)
    assert set(replays.count.values()) == {0}
    llm.generate([{"prompt_token_ids": prompt(9)}], GREEDY)
    assert replays.count == {48: 0, 16: 1, 4: 0}


def test_what_cannot_be_captured_is_told(tiny):
    folder, _ = tiny("llama")
    runner = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2).engine.runner

    def refuse(body):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(OffroadError, match="the CUDA graph of a chunk of 8 tokens"):
        ChunkGraphs((8,), runner.model, runner.ops["prefill"], runner.arrays, refuse)


def test_narrowed_rows_are_what_rows_of_the_step_would_be(tiny):
    """Layers that store nothing run the last token alone: slot, position and width come from the device."""
    folder, _ = tiny("gemma4_e")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    with_graphs(llm)
    runner = llm.engine.runner
    graph, arrays = runner.chunk_graphs.graphs[16], runner.arrays
    arrays.tokens[2, :40] = torch.arange(40)
    with torch.inference_mode():
        graph._fill(2, 20, 9, True)
        torch.take(arrays.tokens.view(-1), graph.places, out=graph.rows.ids)
    one = np.ones(1, np.int32)
    plain = arrays.rows_of(2 * one, 20 * one, 9 * one, 0, one).narrow()
    narrowed = graph.rows.narrow()
    for name in ("ids", "positions", "slot_t", "start_t", "width_t", "offset_t", "wanted"):
        assert getattr(narrowed, name).tolist() == getattr(plain, name).tolist(), name
    for name in ("slot", "start", "width", "offset", "wanted_width"):
        assert getattr(narrowed, name).tolist() == getattr(plain, name).tolist(), name
    assert narrowed.verify == plain.verify == 1


def test_a_runner_makes_what_the_plan_says_with_one_recorder(tiny):
    """One recorder is one pool of memory. Then a prompt and its answer are replays alone."""
    folder, _ = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    expected = answers(llm, [prompt(20)], GREEDY)
    llm.engine.reset_prefix_cache()
    runner, bodies, calls = llm.engine.runner, [], []
    runner.plan = replace(runner.plan, graphs=GraphPlan((1, 2), (1,), "", chunks=(16, 32)))
    runner._capture(lambda body: bodies.append(body) or (lambda: (calls.append(body), body())))
    assert len(bodies) == 4
    assert answers(llm, [prompt(20)], GREEDY) == expected
    assert [bodies.index(body) for body in calls] == [0, 3, 3, 3]  # 32 tokens, then single ones of one row
