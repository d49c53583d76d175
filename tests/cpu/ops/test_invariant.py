"""--batch-invariant: which kernels a plan may take, and what a request's answer no longer depends on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from offroad import LLM, SamplingParams
from offroad.engine import make_plan
from offroad.errors import PlanError
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry
from offroad.schedule.step import Kind
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"


def planned(name: str, scheme: str = "none", device: str = "h100-80gb", **settings) -> Plan:
    source = DummySource(json.loads((CONFIGS / f"{name}.json").read_text()), "cpu", scheme)
    wanted = (
        dict(model="dummy", device=device, max_model_len=4096, memory_utilization=1.0, batch_invariant=True) | settings
    )
    return make_plan(Settings.of(**wanted), source)


@pytest.mark.parametrize("scheme", ["none", "w4a16-g128", "fp8-block"])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.5-35b-a3b", "gemma-4-e4b"])
def test_every_kernel_of_a_gpu_s_plan_keeps_rows_apart(name: str, scheme: str):
    plan, registry = planned(name, scheme), default_registry()
    assert all(registry.invariant(kernel) for kernel in plan.kernels())
    heads = [choice for cell, choice in plan.cells.items() if cell.op == "linear:head"]
    assert {choice.kernel for choice in heads} == {"triton.linear_invariant"}
    for choice in heads:
        reasons = {refusal.kernel: refusal.reason for refusal in choice.refused}
        assert "--batch-invariant" in reasons["torch.linear"]
    assert any(note.startswith("batch invariant:") for note in plan.notes)


def test_without_it_faster_kernels_multiply_and_the_plan_is_another():
    plan, other = planned("qwen3-8b", batch_invariant=False), planned("qwen3-8b")
    [choice] = {c.kernel: c for cell, c in plan.cells.items() if cell.op == "linear:head"}.values()
    assert choice.kernel != "triton.linear_invariant"
    reasons = {refusal.kernel: refusal.reason for refusal in choice.refused}
    assert "--batch-invariant" in reasons["triton.linear_invariant"]
    assert plan.fingerprint != other.fingerprint
    assert not plan.to_json()["batch_invariant"]
    assert other.to_json()["batch_invariant"]


@pytest.mark.parametrize(("name", "device"), [("qwen3-8b", "v100-32gb"), ("qwen3.5-27b", "cpu-avx2")])
def test_a_device_without_such_kernels_says_so(name: str, device: str):
    with pytest.raises(PlanError, match="--batch-invariant") as caught:
        planned(name, device=device)
    assert "without --batch-invariant" in caught.value.next


def test_a_step_must_hold_a_block_beside_all_sequences():
    with pytest.raises(PlanError, match="max-num-batched-tokens") as caught:
        planned("qwen3-8b", max_num_seqs=32, max_num_batched_tokens=95)
    assert "96" in caught.value.accepted
    planned("qwen3-8b", max_num_seqs=32, max_num_batched_tokens=96)


@pytest.fixture(scope="module")
def requests() -> tuple[list[dict], list[SamplingParams]]:
    dice = random.Random(4)
    shared = [dice.randrange(3, 290) for _ in range(130)]
    prompts = [shared[: dice.choice((0, 64, 130))] + [dice.randrange(3, 290) for _ in range(n)] for n in (1, 40, 90, 7)]
    prompts += [shared, shared[:70]]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=20, ignore_eos=True, logprobs=2)
        for i, t in enumerate((0.0, 0.8, 0.0, 1.0, 0.0, 0.7))
    ]
    return [{"prompt_token_ids": ids} for ids in prompts], params


def answers(llm: LLM, prompts: list[dict], params: list[SamplingParams]) -> list[tuple]:
    """Tokens and the bits of their log-probabilities."""
    found = llm.generate(prompts, params)
    return [(r.outputs[0].token_ids, [repr(entry) for entry in r.outputs[0].logprobs]) for r in found]


def watch_cuts(llm: LLM) -> list[tuple[int, int]]:
    """Gets (end, end of the known tokens) of every chunk from here on."""
    scheduler, cuts = llm.engine.scheduler, []
    build = scheduler.build

    def watched():
        step = build()
        if step is not None:
            cuts.extend((row.seq.high, row.seq.goal) for row in scheduler.in_flight[-1][1] if row.kind == Kind.CHUNK)
        return step

    scheduler.build = watched
    return cuts


@pytest.mark.parametrize("drafts", [False, True])
def test_bits_are_those_of_each_request_alone(requests, tmp_path: Path, drafts: bool):
    """On a CPU: among others, cold and warm, in steps of other sizes."""
    from tiny_models import write_tiny

    write_tiny("qwen3", tmp_path)
    settings = dict(device="cpu", dtype="float32", batch_invariant=True)
    settings |= dict(speculative_config='{"method": "ngram", "num_speculative_tokens": 2}') if drafts else {}
    prompts, params = requests
    solo = LLM(str(tmp_path), **settings, max_num_seqs=1, enable_prefix_caching=False)
    expected = [answers(solo, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    for tokens in (512, 64 + 6 * 3):
        together = LLM(str(tmp_path), **settings, max_num_seqs=6, max_num_batched_tokens=tokens)
        cuts = watch_cuts(together)
        for _ in range(2):
            assert answers(together, prompts, params) == expected
        assert all(end % 64 == 0 or end == goal for end, goal in cuts)
        assert tokens > 90 or any(end < goal for end, goal in cuts)
        together.engine.check()
        assert together.engine.stats().prefix_resumed_tokens > 0


def test_with_little_memory_requests_wait_and_none_is_read_again(tmp_path: Path):
    from tiny_models import write_tiny

    write_tiny("qwen3", tmp_path)
    settings = dict(device="cpu", dtype="float32", max_num_seqs=6, max_model_len=256)
    block = LLM(str(tmp_path), **settings).engine.plan.memory.history_block_bytes
    dice = random.Random(6)
    prompts = [{"prompt_token_ids": [dice.randrange(3, 290) for _ in range(n)]} for n in (60, 50, 40, 60, 55)]
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    preempted = {}
    for invariant in (False, True):
        few = LLM(str(tmp_path), **settings, kv_cache_memory_bytes=7 * block, batch_invariant=invariant)
        few.generate(prompts, params)
        few.engine.check()
        preempted[invariant] = few.engine.stats().preemptions
    assert preempted[False] > 0
    assert preempted[True] == 0
