"""Rings on the device: checkpoints of their rows, resumes from them, and a broken sequence among sound ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offroad import LLM, SamplingParams
from offroad.engine import make_plan
from offroad.models.registry import resolve_source
from offroad.models.spec import Store
from offroad.ops import states
from offroad.ops.cells import Cell
from offroad.ops.registry import default_registry, packers
from offroad.run.arrays import Arrays
from offroad.run.bind import prepare
from offroad.run.rows import ReplayView, RingView
from offroad.run.runner import Runner
from offroad.schedule.step import Kind, Start, Step, StepResult, Table, Want
from offroad.settings import Settings
from offroad.weights.load import load
from offroad.weights.safetensors_source import SafetensorsSource

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
CPU = torch.device("cpu")
DENSE = ("embed=torch.embed", "linear=torch.linear")


def runner_of(folder: Path, k: int = 0, store: Store = "rows") -> Runner:
    """A runner whose rings have room for k drafts."""
    settings = Settings.of(
        model=str(folder), device="cpu", dtype="float32", max_num_seqs=5, max_model_len=256, kernel=DENSE
    )
    plan = replace(make_plan(settings, SafetensorsSource(folder)), k=k, store=store, lag=lag_of(k, store))
    resolved, source = resolve_source(SafetensorsSource(folder))
    weights = load(resolved.spec, source, plan.layout, torch.float32, CPU, packers())
    spec = resolved.spec.storing(store, plan.lag)
    return Runner(plan, spec, resolved.model(), weights, prepare(plan, default_registry()), CPU)


def lag_of(k: int, store: Store) -> int:
    return k + 1 if store == "replay" else 0


def rings(arrays: Arrays) -> list[RingView]:
    return [view for views in arrays.views for view in views.values() if isinstance(view, RingView)]


def copies(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 3)


def lengths(arrays: Arrays, **at: int) -> np.ndarray:
    out = np.zeros_like(arrays.length)
    for slot, length in at.items():
        out[int(slot[1:])] = length
    return out


def lay(arrays: Arrays, slot: int, length: int) -> None:
    """Rings as `length` tokens have left them: the row of position p is full of p + 1000 slot, if it is still there."""
    for ring in rings(arrays):
        for p in range(length - ring.capacity, length):
            ring.data[slot, p % ring.capacity] = p + 1000 * slot


def first(tensor: torch.Tensor) -> list[int]:
    """One number a row."""
    return tensor.flatten(1)[:, 0].int().tolist()


@pytest.mark.parametrize("k", [0, 2])
def test_rows_before_a_boundary_come_back_in_order(tiny, k: int):
    arrays = runner_of(tiny("qwen3_5")[0], k).arrays
    assert {ring.capacity for ring in rings(arrays)} == {4 + k, 1 + k}
    for boundary, length in ((64, 64), (65, 65), (128, 128 + k), (127, 127 + k // 2)):
        lay(arrays, 2, length)
        arrays.length[:] = lengths(arrays, s2=length)
        arrays.capture(copies((1, 2, boundary)), lengths(arrays, s2=boundary - 1))
        for ring, kept in arrays.checkpoints:
            assert first(kept[1]) == [p + 2000 for p in range(boundary - kept.shape[1], boundary)]
            ring.data[3] = -1.0
        arrays.restore(copies((1, 3, boundary)))
        for ring, kept in arrays.checkpoints:
            back = {p % ring.capacity: p + 2000 for p in range(boundary - kept.shape[1], boundary)}
            assert first(ring.data[3]) == [back.get(row, -1) for row in range(ring.capacity)]
    assert {kept.shape[1] for _, kept in arrays.checkpoints} == {3, 1}


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(
    ("before", "after", "fires"), [(60, 64, True), (63, 64, True), (64, 65, False), (60, 63, False), (64, 64, False)]
)
def test_a_capture_fires_in_the_step_that_reaches_its_boundary(tiny, k: int, before: int, after: int, fires: bool):
    arrays = runner_of(tiny("qwen3_5")[0], k).arrays
    for _, kept in arrays.checkpoints:
        kept.fill_(-1.0)
    lay(arrays, 1, after)
    arrays.length[:] = lengths(arrays, s1=after, s2=64)
    arrays.capture(copies((0, 1, 64), (3, 2, 128)), lengths(arrays, s1=before, s2=63))
    for _, kept in arrays.checkpoints:
        assert (first(kept[0])[-1] == 1063) == fires
        assert (kept[1:] == -1.0).all()
        assert fires or (kept[0] == -1.0).all()


def test_drafts_may_pass_a_boundary(tiny):
    """With room for two drafts a length may jump over a boundary by two, and the rows before it are still there."""
    arrays = runner_of(tiny("qwen3_5")[0], 2).arrays
    lay(arrays, 1, 66)
    arrays.length[:] = lengths(arrays, s1=66)
    arrays.capture(copies((0, 1, 64)), lengths(arrays, s1=63))
    for _, kept in arrays.checkpoints:
        assert first(kept[0]) == [1000 + p for p in range(64 - kept.shape[1], 64)]


def begin(slot: int, tokens: Iterable[int], length: int = 0) -> Start:
    known = np.array(list(tokens), np.int64)
    return Start(slot, known, length, len(known), GREEDY, seed=0)


def step(rows: list[tuple[int, Kind, int, bool]], number: int = 0, **more) -> Step:
    """A step of rows (slot, kind, width, whether it samples)."""
    slot, kind, width, samples = zip(*rows, strict=True)
    wants = [Want.SAMPLE if wanted else Want.NOTHING for wanted in samples]
    arrays = (np.array(slot, np.int32), np.array(kind, np.uint8), np.array(width, np.int32), np.array(wants, np.uint8))
    return Step(number, *arrays, **more)


def tables(slot: int, *blocks: int) -> np.ndarray:
    return np.array([(slot, Table.HISTORY, column, block) for column, block in enumerate(blocks)], np.int32)


def run(runner: Runner, *steps: Step) -> StepResult:
    """The result of the last step."""
    for one in steps:
        runner.launch(one)
        result = runner.result()
    return result


def spoil(arrays: Arrays, slot: int) -> None:
    for ring, _ in arrays.checkpoints:
        for held in (ring.data,) if isinstance(ring, RingView) else (ring.state, ring.key, ring.delta, ring.decay):
            held[slot] = float("nan")


@pytest.mark.parametrize(("k", "store"), [(0, "rows"), (2, "rows"), (0, "replay"), (2, "replay")])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_sequence_goes_on_from_a_checkpoint_as_if_it_had_run_there(tiny, family: str, k: int, store: Store):
    """Slot 1 runs a prompt with a stop at a boundary; slot 2 begins there, on the checkpoint and the same block."""
    runner = runner_of(tiny(family)[0], k, store)
    prompt = [5 + 7 * i % 280 for i in range(90)]
    chunk, verify = Kind.CHUNK, Kind.VERIFY
    cold = [run(runner, step([(1, chunk, 40, False)], starts=(begin(1, prompt),), tables=tables(1, 1, 2)))]
    cold.append(run(runner, step([(1, chunk, 24, False)], captures=copies((2, 1, 64)))))
    cold.append(run(runner, step([(1, chunk, 26, True)])))
    cold += [run(runner, step([(1, verify, 1, True)])) for _ in range(5)]
    spoil(runner.arrays, 2)
    resume = dict(starts=(begin(2, prompt, 64),), tables=tables(2, 1, 3), restores=copies((2, 2, 64)))
    warm = [run(runner, step([(2, chunk, 26, True)], **resume))]
    warm += [run(runner, step([(2, verify, 1, True)])) for _ in range(5)]
    assert [r.tokens[0, 0] for r in warm] == [r.tokens[0, 0] for r in cold[2:]]
    for ring, kept in runner.arrays.checkpoints:
        found, expected = (ring.before(slot, 90 + 5, kept.shape[1]) for slot in (2, 1))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("store", ["rows", "replay"])
def test_a_capture_in_the_middle_of_a_verify_step(tiny, store: Store, accepted: int):
    """A step from 62 with two drafts, of which some are accepted, and one without drafts behind it. What it captures at
    each boundary that it has passed is what a run without drafts has there."""
    runner, plain = runner_of(tiny("qwen3_5")[0], 2, store), runner_of(tiny("qwen3_5")[0])
    prompt = [5 + 7 * i % 280 for i in range(62)]
    more = dict(starts=(begin(1, prompt),), tables=tables(1, 1, 2))
    told, kept = [], {}
    for number in range(5):
        row = (1, Kind.VERIFY, 1, True) if number else (1, Kind.CHUNK, 62, True)
        length = int(plain.arrays.length[1])
        result = run(
            plain, step([row], captures=copies((0, 1, length + 1 if number else 62)), **({} if number else more))
        )
        told.append(int(result.tokens[0, 0]))
        kept[int(plain.arrays.length[1])] = [rows[0].clone() for _, rows in plain.arrays.checkpoints]
    run(runner, step([(1, Kind.CHUNK, 62, True)], **more))
    drafts = np.array([told[1] if accepted else told[1] + 1, told[2] if accepted == 2 else told[2] + 1])
    runner.arrays.draft(1, drafts)
    result = run(runner, step([(1, Kind.VERIFY, 3, True)], captures=copies(*((i, 1, 63 + i) for i in range(3)))))
    assert result.accepted[0] == 1 + accepted
    run(runner, step([(1, Kind.VERIFY, 1, True)], captures=copies((3, 1, 64 + accepted))))
    for place, boundary in [*((i, 63 + i) for i in range(1 + accepted)), (3, 64 + accepted)]:
        for (_, found), expected in zip(runner.arrays.checkpoints, kept[boundary], strict=True):
            torch.testing.assert_close(found[place], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0, 1])
def test_a_slot_takes_the_bytes_that_the_plan_says(tiny, share: int, monkeypatch):
    """Beside the carry of no drafter there are conv columns and states: as rows, or one and records."""
    monkeypatch.setattr(states, "ROWS_SHARE", share)
    for k in (0, 1, 4):
        drafts = f'{{"method": "ngram", "num_speculative_tokens": {k}}}' if k else ""
        llm = LLM(str(tiny("qwen3_5")[0]), device="cpu", dtype="float32", max_num_seqs=3, speculative_config=drafts)
        plan, arrays = llm.engine.plan, llm.engine.runner.arrays
        assert plan.store == ("replay" if k and not share else "rows")
        assert any(isinstance(ring, ReplayView) for ring, _ in arrays.checkpoints) == (plan.store == "replay")
        taken = 0
        for ring, _ in arrays.checkpoints:
            held = (ring.data,) if isinstance(ring, RingView) else (ring.state, ring.key, ring.delta, ring.decay)
            taken += sum(tensor.nbytes for tensor in held)
        assert taken == plan.memory.slots * plan.memory.slot_bytes
        assert (f"recurrent states: {'one is' if not share else 'rows are'} kept" in plan.explain()) == bool(k)
        assert ("replay" in plan.cells[Cell(0, "gated_delta", "decode")].problem.features) == (plan.store == "replay")
        llm.close()


POISON = 299  # a token whose embedding is not finite; no sound sequence here draws it


def generated(runner: Runner, prompts: dict[int, list[int]]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """(tokens, bad layers) by slot of a few steps with all sequences; a broken one leaves. Shorter prompts begin to
    generate while longer ones still run chunks of 30."""
    tokens: dict[int, list[int]] = {slot: [] for slot in prompts}
    bad: dict[int, int] = {}
    done = dict.fromkeys(prompts, 0)
    starts = tuple(begin(slot, prompt) for slot, prompt in prompts.items())
    edits = np.concatenate([tables(slot, 3 * slot, 3 * slot + 1) for slot in prompts])
    for number in range(7):
        rows = []
        for slot, prompt in prompts.items():
            left = len(prompt) - done[slot]
            if slot not in bad:
                rows.append((slot, Kind.CHUNK, min(30, left), left <= 30) if left > 0 else (slot, Kind.VERIFY, 1, True))
        rows.sort(key=lambda row: row[1])
        more = dict(starts=starts, tables=edits) if number == 0 else {}
        result = run(runner, step(rows, number, **more))
        for i, (slot, _, width, samples) in enumerate(rows):
            done[slot] += width
            if result.bad_layer[i] >= 0:
                bad[slot] = int(result.bad_layer[i])
            elif samples:
                tokens[slot].append(int(result.tokens[i, 0]))
    return tokens, bad


def poisoned(folder: Path) -> Runner:
    runner = runner_of(folder)
    for ops in runner.ops.values():
        ops.model.linears["embed"].tensors["w"][POISON] = float("nan")
    return runner


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("at", [0, 20, 44])
def test_a_broken_row_ends_and_its_batch_mates_do_not_notice(tiny, family: str, at: int):
    """The others' tokens and states are those of a run without it. It may break in a chunk that samples nothing: then
    that is noticed with the first token."""
    sound = {1: [9, 30, 31], 3: [100 + i for i in range(64)], 4: [40]}
    broken = [POISON if i == at else 50 + i for i in range(45)]
    alone, together = (poisoned(tiny(family)[0]) for _ in range(2))
    expected, none = generated(alone, sound)
    found, bad = generated(together, {1: sound[1], 2: broken, 3: sound[3], 4: sound[4]})
    assert none == {}
    assert bad == {2: 0}
    assert found.pop(2) == []
    assert found == expected
    assert all(len(tokens) >= 5 for tokens in found.values())
    assert (alone.arrays.length[[1, 3, 4]] == together.arrays.length[[1, 3, 4]]).all()
    for one, other in zip(rings(alone.arrays), rings(together.arrays), strict=True):
        for slot in sound:
            assert one.data[slot].isfinite().all()
            torch.testing.assert_close(one.data[slot], other.data[slot], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_layer_of_a_broken_state_or_cache_is_named(tiny, layer: int):
    runner = runner_of(tiny("qwen3_5")[0])
    starts = (begin(1, [5, 6, 7]), begin(2, [8, 9]))
    edits = np.concatenate((tables(1, 1), tables(2, 2)))
    run(runner, step([(1, Kind.CHUNK, 3, True), (2, Kind.CHUNK, 2, True)], starts=starts, tables=edits))
    for name, view in runner.arrays.views[layer].items():
        if name == "kv":
            view.v[2, 0] = float("inf")
        elif name == "state":
            view.data[2] = float("inf")
    result = run(runner, step([(1, Kind.VERIFY, 1, True), (2, Kind.VERIFY, 1, True)]))
    assert result.bad_layer.tolist() == [-1, layer]


def test_nothing_of_a_broken_sequence_is_resumed(tiny):
    """A sequence breaks behind a checkpoint that it shares with a sound one, then before it. Later ones are right, also
    those that resume what the same prompt has left when nothing was broken."""
    llm = LLM(str(tiny("qwen3_5")[0]), device="cpu", dtype="float32", max_num_seqs=4, kernel=list(DENSE))
    embeddings = [ops.model.linears["embed"].tensors["w"] for ops in llm.engine.runner.ops.values()]
    shared = [11 + i % 200 for i in range(130)]
    sound, late, early = [*shared, 21, 22], [*shared, 30, POISON, 31], [*shared[:9], POISON, *shared]

    def outputs(*prompts: list[int]) -> list[list[int]]:
        """The tokens of prompts that run at once; a broken one has none."""
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
        llm.engine.check()
        for result in results:
            out = result.outputs[0]
            assert ("layer 0" in out.error) if out.finish_reason == "error" else len(out.token_ids) == 10
        assert {result.usage.cached_tokens for result in results} <= {0, 128}
        cached.append(results[0].usage.cached_tokens)
        return [result.outputs[0].token_ids for result in results]

    cached: list[int] = []
    expected = outputs(sound, late, early)
    llm.engine.scheduler.cache.reset_prefixes()
    whole = embeddings[0][POISON].clone()
    for w in embeddings:
        w[POISON] = float("nan")
    cached.clear()
    assert outputs(sound) == outputs(sound) == expected[:1]
    assert cached == [0, 128]
    assert outputs(late, sound) == [[], expected[0]]
    assert outputs(sound, early) == [expected[0], []]
    assert outputs(early) == [[]]
    for w in embeddings:
        w[POISON] = whole
    cached.clear()
    assert outputs(early) == outputs(early) == expected[2:]
    assert cached == [0, 128]
    assert outputs(sound, late) == expected[:2]
    llm.close()
