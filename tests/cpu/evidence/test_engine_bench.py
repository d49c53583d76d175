"""The engine's cases and their roofline; times by op; the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offroad import LLM
from offroad.engine import make_plan
from offroad.evidence import engine_bench, op_times
from offroad.evidence.engine_bench import ANSWER, Case
from offroad.evidence.perf import Sample
from offroad.models.registry import resolve_model
from offroad.ops.budget import Dtypes, packed_bytes
from offroad.ops.roofline import Costs, costs
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"


def costs_for(name: str, scheme: str) -> Costs:
    """Those of a plan for one sequence on the H100's profile."""
    source = DummySource(json.loads((CONFIGS / f"{name}.json").read_text()), "cpu", scheme)
    settings = Settings.of(model=name, device="h100-80gb", allow_reference=True, max_num_seqs=1, max_model_len=4096)
    plan = make_plan(settings, source)
    spec = resolve_model(source.config).spec
    packed = packed_bytes(spec, source.headers, plan.cells, plan.dtype)
    found = costs(spec, packed, plan.device, Dtypes(plan.dtype, plan.kv_dtype))
    assert found is not None
    return found


class FakeTarget:
    """Prefill of 1,000 tokens a second, 10 ms a step of decode; the first round of each kind is slower."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, int]] = []

    def vocab(self) -> int:
        return 100

    def round(self, prompts, answer):
        self.rounds.append((len(prompts), len(prompts[0]), answer))
        begin = sum(map(len, prompts)) / 1000 + (0.5 if self.rounds.count(self.rounds[-1]) == 1 else 0.0)
        return [Sample([begin + 0.01 * i for i in range(answer)], [1] * answer) for _ in prompts]


def test_speeds_are_those_of_the_best_rounds(monkeypatch):
    monkeypatch.setattr(engine_bench, "EngineTarget", lambda engine: FakeTarget())
    cases = {"decode_c8": Case(8, 1024, True), "prefill_8k": Case(1, 8192, False)}
    saved, notes = [], []
    speeds = engine_bench.measure(None, cases, 2, notes.append, lambda *now: saved.append(now))
    assert speeds["decode_c8"] == pytest.approx(800)
    assert speeds["decode_steady_c8"] == pytest.approx(800)
    assert speeds["prefill_8k"] == pytest.approx(1000)
    assert [sorted(now) for now, *_ in saved] == [["decode_c8", "decode_steady_c8"], sorted(speeds)]
    assert saved[-1][1]["8 x 1024 + 1"] == pytest.approx([8.692, 8.192])
    assert "decode_c8 800.0 tok/s, decode_steady_c8 800.0 tok/s" in notes


def test_steady_steps_are_those_of_all_sequences():
    """Two sequences: the first decodes 20 slow steps before the second's first token, then both take steps of 10 ms."""
    late = [1.0 + 0.01 * i for i in range(40)]
    early = [0.5 + 0.025 * i for i in range(20)] + late
    samples = [Sample(early, [1] * 60), Sample(late, [1] * 40)]
    assert engine_bench.steady(samples) == pytest.approx(200)
    samples[0].tokens[:20] = [7] * 20  # what came before does not count
    assert engine_bench.steady(samples) == pytest.approx(200)
    samples[1].tokens[1:] = [3] * 39  # with drafts a step gives several
    assert engine_bench.steady(samples) == pytest.approx(400)


def test_waves_are_not_steady():
    first, second = [0.1 * i for i in range(1, 20)], [2.0 + 0.1 * i for i in range(20)]
    assert engine_bench.steady([Sample(first, [1] * 19), Sample(second, [1] * 20)]) is None
    assert engine_bench.steady([Sample([0.1], [1])]) is None


def test_the_roofline_of_the_27b():
    """By hand: 27B w4a16 reads 15.5 GB a step of one row at 1,088 tokens with bf16 scales, and 1.2 more with scales and
    minima in fp32, so 200 to 216 tokens a second at 3.35 TB/s; 8,192 tokens of prefill take 399 TFLOP in linears and
    13.2 in attention."""
    found = costs_for("qwen3.5-27b", "w4a16-g128")
    assert 198 < 1 / found.decode(1, 1024 + ANSWER // 2) < 218
    operations = found.prefill(8192) * found.rate
    assert 0.99 < operations / (399e12 + 13.2e12) < 1.02
    assert engine_bench.shares({"decode_c1": 1 / found.decode(1, 1088)}, found)["decode_c1"] == pytest.approx(1)
    assert engine_bench.shares({"decode_steady_c1": 0.5 / found.decode(1, 1088)}, found) == {
        "decode_steady_c1": pytest.approx(0.5)
    }
    assert engine_bench.shares({"decode_c1": 1.0}, None) == {}


def test_windows_end_attention_at_their_width():
    found = costs_for("gemma-4-31b", "w4a16-g32")
    full, windowed = found.attention
    assert (full, windowed) == (10 * 4 * 32 * 512, 50 * 4 * 32 * 256)
    tokens = 16384
    pairs = full * tokens**2 / 2 + windowed * (1024 * 1024 / 2 + (tokens - 1024) * 1024)
    linear = (found.per_token - found.head) * tokens + found.head
    assert found.prefill(tokens) * found.rate == pytest.approx(linear + pairs)
    assert found.decode(1, 5000) - found.decode(1, 1024) == pytest.approx(3976 * found.history / found.bandwidth)


def test_a_kernel_that_starts_early_takes_what_is_left_when_those_before_it_have_ended():
    spans = [("b", 2.0, 12.0), ("a", 0.0, 10.0), ("a", 15.0, 18.0), ("c", 4.0, 11.0)]
    assert op_times.added(spans) == {"a": (2, 13.0), "c": (1, 1.0), "b": (1, 1.0)}  # and nothing from 12 to 15


def test_times_of_nested_ops_are_their_own():
    now = [0.0]
    timer = op_times.Clock(lambda: now[0], lambda begin, end: end - begin)

    def inner() -> None:
        now[0] += 2

    timed = timer.timed("inner", inner)

    def outer() -> None:
        now[0] += 1
        timed()
        timed()

    timer.timed("outer", outer)()
    timer.timed("inner", inner)()
    assert timer.totals() == {"outer": (1, 1.0), "inner": (3, 6.0)}


def test_every_op_of_a_step_is_timed(tiny):
    folder, _ = tiny("qwen3_5")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=2)
    plain = llm.engine.runner.ops
    times = op_times.step_times(llm.engine, 2, 40)
    layers = len(plain["decode"].layers)
    decode = {entry["op"]: entry["calls"] for entry in times["decode"]["ops"]}
    assert decode["embed"] == decode["linear:head"] == 1
    assert decode["gated_delta"] + decode["attention_block"] == layers == decode["mlp_block"]
    assert sum(entry["share"] for entry in times["prefill"]["ops"]) == pytest.approx(1)
    assert llm.engine.runner.ops is plain
    op_times.add_kernels(llm.engine, times, {"linear:head": 1000})
    head = next(entry for entry in times["decode"]["ops"] if entry["op"] == "linear:head")
    assert head["kernel"] == "cpu.linear"
    assert head["gb_s"] > 0
    assert "one decode step of 2 rows" in op_times.render(times)
    llm.close()
