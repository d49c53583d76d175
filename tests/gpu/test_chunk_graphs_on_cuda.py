"""CUDA graphs of one chunk: tokens of eager steps, also in turn with rows that decode, nothing allocated by a replay,
memory as planned, and the time to a first token of a real shape. Run with -s to see the figures."""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "cpu"), str(TESTS / "cpu/speculate"), str(TESTS / "gpu")]
from mtp_files import with_drafter  # noqa: E402
from test_real_shapes import CONFIGS, generate  # noqa: E402
from tiny_models import write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402
from offroad.engine import Engine  # noqa: E402
from offroad.run.chunk_graphs import ChunkGraphs  # noqa: E402
from offroad.run.graphs import Graphs  # noqa: E402
from offroad.schedule.request import Request  # noqa: E402
from offroad.schedule.step import Step  # noqa: E402
from offroad.schedule.turns import Turns  # noqa: E402
from offroad.settings import Settings  # noqa: E402
from offroad.weights.dummy import DummySource  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, presence_penalty=0.4)
LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 129, 200)
MIB = 2**20


def prompt(length: int, vocab: int = 290) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, vocab) for _ in range(length)]


def counted(graphs: ChunkGraphs | Graphs) -> list:
    """Sizes of replays from here on."""
    seen: list = []

    def noting(size, replay):
        return lambda: (seen.append(size), replay())

    for size, graph in graphs.graphs.items():
        graph.replay = noting(size, graph.replay)
    return seen


CASES = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),
    "gemma4_e, drafts": ("gemma4_e", dict(speculative_config=NGRAM)),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, invariant": ("qwen3_5", dict(batch_invariant=True)),
    "qwen3_5, a drafter that eats all states": ("qwen3_5", dict(speculative_config=MTP)),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_one_prompt_after_the_other_gives_the_tokens_of_eager_steps(name: str, tmp_path: Path):
    family, more = CASES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny(family, folder)
    if more.get("speculative_config") == MTP:
        with_drafter(folder, tmp_path / "mtp", family)
        folder = tmp_path / "mtp"
    settings = dict(device="cuda", dtype="float32", max_num_seqs=3, max_num_batched_tokens=128, allow_reference=True)
    settings |= dict(memory_utilization=0.2) | more
    eager, graphed = LLM(str(folder), **settings, enforce_eager=True), LLM(str(folder), **settings)
    if graphed.engine.runner.chunk_graphs is None:
        pytest.skip(f"no graphs: {graphed.engine.plan.graphs.describe()}")
    seen = counted(graphed.engine.runner.chunk_graphs)
    for params in (GREEDY, SAMPLED):
        for length in LENGTHS:
            text = [{"prompt_token_ids": prompt(length)}]
            found, expected = (llm.generate(text, params)[0].outputs[0] for llm in (graphed, eager))
            assert found.token_ids == expected.token_ids, length
    turns = prompt(70)
    for length in (5, 20, 40, 9):  # behind what the prefix cache has
        turns = turns + prompt(length)
        found, expected = (llm.generate([{"prompt_token_ids": turns}], GREEDY)[0] for llm in (graphed, eager))
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        turns = turns + found.outputs[0].token_ids
    assert set(seen) == set(graphed.engine.plan.graphs.chunks)
    assert graphed.engine.stats().late_compilations == 0
    graphed.engine.check()


def shared_steps(engine: Engine) -> list[int]:
    """From here on: tokens of the steps in which rows decode beside chunks."""
    seen: list[int] = []
    launch = engine.runner.launch

    def noting(step: Step) -> None:
        if len(set(step.kind.tolist())) > 1:
            seen.append(int(step.width.sum()))
        launch(step)

    engine.runner.launch = noting
    return seen


def beside(engine: Engine, lengths: tuple[int, ...], params: SamplingParams) -> dict[str, list[int]]:
    """Answers of two long sequences and of prompts that come one by one while those decode, six steps apart."""
    long = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=90, ignore_eos=True)
    coming = [Request(id=f"{n} tokens", prompt_ids=prompt(n), params=params, seed=n) for n in reversed(lengths)]
    for n in (5, 6):
        engine.submit(Request(id=f"long {n}", prompt_ids=prompt(n), params=long, seed=n))
    found: dict[str, list[int]] = {}
    steps = 0
    while coming or engine.has_work():
        if steps % 6 == 5 and coming and len(engine.scheduler.running) < 4:
            engine.submit(coming.pop())
        for event in engine.step():
            assert event.error is None, event.error
            found.setdefault(event.request_id, []).extend(event.token_ids)
        steps += 1
    engine.check()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_prompts_beside_rows_that_decode_take_turns_with_them(name: str, tmp_path: Path):
    """Same tokens as from eager steps that all rows share; every step is a replay. 200 tokens are two chunks or three,
    of which the last one ends the prompt."""
    family, more = CASES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny(family, folder)
    if more.get("speculative_config") == MTP:
        with_drafter(folder, tmp_path / "mtp", family)
        folder = tmp_path / "mtp"
    settings = dict(device="cuda", dtype="float32", max_num_seqs=4, max_num_batched_tokens=128, allow_reference=True)
    settings |= dict(memory_utilization=0.2) | more
    eager, graphed = (LLM(str(folder), **settings, enforce_eager=only).engine for only in (True, False))
    runner = graphed.runner
    if runner.chunk_graphs is None:
        pytest.skip(f"no graphs: {graphed.plan.graphs.describe()}")
    graphed.scheduler.turns = Turns(runner.chunk_graphs.sizes[-1])  # whatever the plan thinks of this device
    chunks, rows = counted(runner.chunk_graphs), counted(runner.graphs)
    apart, together = shared_steps(graphed), shared_steps(eager)
    lengths = (1, 17, 33, 64, 100, 200)
    for params in (GREEDY, SAMPLED):
        expected, found = beside(eager, lengths, params), beside(graphed, lengths, params)
        assert found == expected
        for engine in (eager, graphed):
            engine.reset_prefix_cache()
    assert together
    assert not apart
    assert len(chunks) >= 2 * (len(lengths) + 1)
    assert len(rows) > len(chunks)
    assert graphed.stats().steps == len(chunks) + len(rows)
    assert graphed.stats().late_compilations == 0


def make(quantization: str, seqs: int = 2) -> Engine:
    settings = Settings.of(
        model="random", device="cuda", dtype="bfloat16", max_model_len=4096, max_num_seqs=seqs,
        max_num_batched_tokens=2048, memory_utilization=0.5,
    )  # fmt: skip
    return Engine(settings, source=DummySource(CONFIGS["Qwen3.5-27B, 16 layers"], "cuda", quantization))


def seconds(engine: Engine, ids: list[int]) -> float:
    """To the first token, of five runs the median."""
    taken = []
    for _ in range(6):  # the first may load libraries
        engine.reset_prefix_cache()
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate(engine, ids, 1)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


@torch.inference_mode()
def device_seconds(graph) -> float:
    """Of a replay, with a chunk of the whole size in the bin: a graph's numbers are another's once that has run."""
    graph.run(0, 0, graph.size, False)
    replay = graph.replay
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 3e3


@pytest.mark.timeout(300)
def test_a_first_token_of_a_real_shape():
    torch.cuda.empty_cache()
    engine = make("w4a16-g128")
    runner, planned = engine.runner, engine.plan.graphs
    graphs = runner.chunk_graphs
    assert graphs is not None, planned.describe()
    print(f"\n{planned.describe()}; {engine.info.memory_summary}")
    print(f"graphs of chunks took {graphs.nbytes / MIB:.0f} MiB, planned {planned.chunk_bytes / MIB:.0f}")
    logits: list[torch.Tensor] = []
    finish = runner._finish

    def noting(step, ran):
        if len(ran.hidden):
            logits.append((ran.ops.logits(ran.hidden) if ran.logits is None else ran.logits).float().clone())
        return finish(step, ran)

    for length in (20, 55, 281, 512):
        ids, times = prompt(length, 240000), []
        runner._finish = noting
        logits.clear()
        for used in (None, graphs):
            runner.chunk_graphs = used
            engine.reset_prefix_cache()
            generate(engine, ids, 1)
        runner._finish = finish
        error = float((logits[0] - logits[-1]).norm() / logits[0].norm())
        for used in (None, graphs):
            runner.chunk_graphs = used
            times.append(1e3 * seconds(engine, ids))
        size = next(size for size in graphs.sizes if size >= length)
        alone = 1e3 * device_seconds(graphs.graphs[size])
        print(
            f"  {length:>4} tokens of 16 layers: first token eager {times[0]:6.1f} ms, by graphs {times[1]:6.1f}; "
            f"a replay of {size} takes the device {alone:6.2f} ms; logits apart {error:.4f}"
        )
        assert error < 0.05
        assert times[1] < times[0]
    _replay_allocates_nothing(engine)
    assert graphs.nbytes < 1.1 * planned.chunk_bytes
    engine.close()


def first_and_eight(engine: Engine, ids: list[int], rows: int) -> tuple[float, float]:
    """A prompt comes while `rows` sequences decode: seconds to its first token, and until each of the others has eight
    more tokens. The median of five."""
    first, eight = [], []
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for turn in range(6):  # the first may load libraries
        engine.reset_prefix_cache()
        told = {f"{turn} {i}": 0 for i in range(rows)}
        for i, name in enumerate(told):
            engine.submit(Request(id=name, prompt_ids=prompt(20 + i, 240000), params=params))
        while min(told.values()) < 8:
            for event in engine.step():
                told[event.request_id] += len(event.token_ids)
        torch.cuda.synchronize()
        engine.submit(Request(id="new", prompt_ids=ids, params=params))
        began, goal, came = time.perf_counter(), {name: count + 8 for name, count in told.items()}, 0.0
        while not came or any(told[name] < count for name, count in goal.items()):
            for event in engine.step():
                if event.request_id in told:
                    told[event.request_id] += len(event.token_ids)
                else:
                    came = came or time.perf_counter() - began
        first.append(came)
        eight.append(time.perf_counter() - began)
        for name in (*told, "new"):
            engine.abort(name)
        while engine.has_work():
            engine.step()
    return statistics.median(first[1:]), statistics.median(eight[1:])


@pytest.mark.timeout(300)
def test_a_prompt_beside_16_rows_of_a_real_shape():
    torch.cuda.empty_cache()
    engine = make("w4a16-g128", seqs=17)
    planned = engine.plan.graphs
    print(f"\n{planned.describe()}")
    assert engine.runner.chunk_graphs is not None
    for length in (20, 55, 200, 500):
        times = []
        for turns in (0, engine.runner.chunk_graphs.sizes[-1]):
            engine.scheduler.turns = Turns(turns)
            times += [1e3 * value for value in first_and_eight(engine, prompt(length, 240000), 16)]
        print(
            f"  {length:>4} tokens beside 16 rows of 16 layers: first token {times[0]:6.1f} ms in a shared step, "
            f"{times[2]:6.1f} in turn; eight more tokens of each row after {times[1]:6.1f} and {times[3]:6.1f}"
        )
        assert times[2] < times[0]
    engine.close()


def _replay_allocates_nothing(engine: Engine) -> None:
    graph = engine.runner.chunk_graphs.graphs[64]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.inference_mode():
        graph.run(0, 0, 40, True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
