"""What `test_warm.py` runs without Triton's interpreter: an H100 that is not there, and models on the CPU whose kernels
are asked for and never run. Prints a line of JSON for each case."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from live_bytes import LiveBytes
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from offroad.engine import attach, make_plan
from offroad.nvrtc.hopper import LINEAR_W4, LINEAR_W8
from offroad.ops.bound import Ops
from offroad.ops.capture import GraphPlan
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry, packers
from offroad.ops.workspace import live
from offroad.run.bind import prepare
from offroad.run.chunk_graphs import ChunkGraphs
from offroad.run.graphs import Graphs
from offroad.run.runner import Runner
from offroad.run.warm import Parts, Shape, Twins, gather
from offroad.schedule.step import Kind, Step, Want
from offroad.settings import Settings
from offroad.speculate.config import drafting
from offroad.triton_kernels import dependent, warm
from offroad.triton_kernels.draw import fused_draw
from offroad.triton_kernels.memory import MEMORY, dense_bytes, dense_outputs, split_bytes
from offroad.weights.dummy import DummySource
from offroad.weights.load import load

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
QWEN = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
SMALL = dict(hidden_size=256, vocab_size=384, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
DENSE = dict(intermediate_size=384)
QWEN3 = ("qwen3-8b", SMALL | DENSE | dict(num_hidden_layers=2))
HYBRID = SMALL | DENSE | QWEN | dict(num_hidden_layers=4, mtp_num_hidden_layers=0)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
TRITON = dict(kernel=("linear@affine4=triton.linear_w4", "linear@fp8=triton.linear_w8"))
CASES: dict[str, tuple[str, dict, str, dict]] = {
    "qwen3 invariant": (*QWEN3, "w4a16-g128", dict(batch_invariant=True)),
    "qwen3 drafts": (*QWEN3, "fp8-block", TRITON | dict(speculative_config=NGRAM)),
    "qwen3 w8a8": (*QWEN3, "fp8-block", dict(kernel=("linear@fp8=triton.linear_w8a8",))),
    "qwen3.5": ("qwen3.5-27b", HYBRID, "w4a16-g128", TRITON),
    "qwen3 hopper": (*QWEN3, "fp8-block", dict(speculative_config=NGRAM)),
    "qwen3.5 hopper": ("qwen3.5-27b", HYBRID, "w4a16-g128", {}),
    "moe": (
        "qwen3.5-35b-a3b",
        SMALL
        | QWEN
        | dict(num_hidden_layers=4, mtp_num_hidden_layers=0, num_experts=16, num_experts_per_tok=8)
        | dict(moe_intermediate_size=64, shared_expert_intermediate_size=64),
        "w4a16-g32",
        TRITON,
    ),
    "gemma e": (
        "gemma-4-e4b",
        SMALL
        | DENSE
        | dict(num_hidden_layers=12, num_kv_shared_layers=6, hidden_size_per_layer_input=32)
        | dict(vocab_size_per_layer_input=384, global_head_dim=64, sliding_window=96),
        "w4a16-g32",
        TRITON | dict(kv_cache_dtype="fp8_e5m2"),
    ),
}  # fmt: skip


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def runner_of(name: str) -> tuple[Plan, Runner]:
    """A runner of an H100's plan, its tensors on the CPU."""
    model, changes, scheme, more = CASES[name]
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    config.get("text_config", config).update(changes)
    settings = Settings.of(
        model="dummy", device="h100-80gb", max_num_seqs=20, max_num_batched_tokens=600, max_model_len=400,
        kv_cache_memory_bytes=1 << 27, checkpoint_memory_bytes=1 << 20, **more,
    )  # fmt: skip
    source = DummySource(config, "cpu", scheme)
    plan = make_plan(settings, source)
    resolved, source = attach(settings, source)
    spec = drafting(resolved.spec, source.headers, plan.drafter).storing(plan.store)
    device = torch.device("cpu")
    weights = load(
        spec, source, plan.layout, getattr(torch, plan.dtype), device, packers(), lambda done, note: None
    )  # fmt: skip
    graphs, plan = plan.graphs, replace(plan, graphs=GraphPlan())
    runner = Runner(plan, spec, resolved.model(), weights, prepare(plan, default_registry()), device)
    runner.graph_plan = graphs
    runner.live = live(spec, plan.device, settings, 2)
    return plan, runner


def steps(plan: Plan, arrays, random_: random.Random, count: int):
    """Rows of steps as a scheduler makes them: chunks of any length, verify rows with any drafts, wants or none."""
    for i in range(count):
        verify = random_.randrange(0, plan.max_num_seqs + 1) if i % 3 else 0
        single = i % 5 == 4  # many chunks of a token
        chunks = random_.randrange(0 if verify else 1, plan.max_num_seqs + 1 - verify + (not verify)) if i % 4 else 0
        chunks = chunks if verify or chunks else 1
        slots = np.array(random_.sample(range(1, plan.max_num_seqs + 1), min(verify + chunks, plan.max_num_seqs)))
        chunks = len(slots) - verify
        arrays.drafted[slots] = [random_.randrange(plan.k + 1) for _ in slots]
        width = np.full(len(slots), plan.k + 1, np.int32)
        room = plan.chunk - verify * (plan.k + 1)
        for row in range(verify, len(slots)):
            most = max(1, min(plan.max_len, room - (len(slots) - row - 1)))
            width[row] = 1 if single or random_.random() < 0.2 else random_.randint(1, most)
            room -= width[row]
        kind = np.array([Kind.VERIFY] * verify + [Kind.CHUNK] * chunks, np.uint8)
        wants = np.array([Want.SAMPLE] * verify + [random_.choice((0, 1)) for _ in range(chunks)], np.uint8)
        arrays.length[slots] = [random_.randrange(0, max(1, plan.max_len - int(w))) for w in width]
        yield arrays.rows(Step(i, slots.astype(np.int32), kind, width, wants)), verify == len(slots)


def served(plan: Plan, runner: Runner, count: int) -> warm.Launches:
    """What random steps and the plan's graphs launch, layer by layer, none of them left out."""
    launches, twins, source = warm.Launches(), Twins(), random.Random(3)
    ops = {phase: twins(found) for phase, found in runner.ops.items()}
    with torch.inference_mode(), warm.collect(launches):
        for rows, alone in steps(plan, runner.arrays, source, count):
            phase = "decode" if alone else "prefill"
            rows = Twins()(rows)
            ops[phase].logits(runner.model.forward(rows, ops[phase]))
            if runner.drafting is not None:
                runner.drafting.proposer.rehearse(phase, rows, twins)
    graphs = Graphs(runner.graph_plan, runner.model, runner.ops["decode"], runner.arrays, lambda body: body)
    alone = ChunkGraphs(runner.graph_plan.chunks, runner.model, runner.ops["prefill"], runner.arrays, lambda body: body)
    with torch.inference_mode(), warm.collect(launches):
        for graph in graphs.graphs.values():
            graph.widths[:] = graph.width  # as on a GPU
            runner.model.forward(Twins()(graph.rows), ops["decode"])
        for size, graph in alone.graphs.items():
            graph.rows.width[:] = size  # likewise
            ops["prefill"].logits(runner.model.forward(Twins()(graph.rows), ops["prefill"]))
    return launches


def shared_memory(plan: Plan) -> tuple[int, int, int, int]:
    """(bytes that were asked for at once, planned, the largest piece of a dequantised weight, the least planned)."""
    most = dense_bytes(plan.device.memory)
    packed = [
        choice.problem
        for choice in plan.cells.values()
        if choice.kernel in ("triton.linear_w4", "triton.linear_w8", LINEAR_W4, LINEAR_W8)
    ]
    pieces = [
        2 * problem.size("k") * dense_outputs(problem.size("n"), problem.size("k"), 2, most) for problem in packed
    ]
    asked = MEMORY.most.pop(torch.device("meta"), 0)
    return asked, plan.memory.workspaces.kept, max(pieces, default=0), split_bytes(plan.device.units)


def activations(plan: Plan, runner: Runner) -> tuple[int, int]:
    """(bytes that live at once in a step of as many tokens as it may have, all of prompts, what is planned for it)."""
    tokens, twins = plan.chunk, Twins()
    ops = twins(runner.ops["prefill"])
    rows = Twins()(Shape((), (plan.max_len, tokens - plan.max_len)).rows(runner.arrays))
    with torch.inference_mode(), warm.collect(warm.Launches()):
        runner.model.forward(rows, ops)  # makes what kernels share, and what is kept
        with LiveBytes() as made:
            runner.model.forward(rows, ops)
    taken = [(cell.op, choice.temporary) for cell, choice in plan.cells.items()]
    return made.most, tokens * runner.live.most + runner.live.beside(tokens, taken)


def closed(name: str, count: int) -> dict:
    plan, runner = runner_of(name)
    proposer = runner.drafting.proposer if runner.drafting is not None else None
    parts = Parts(plan, runner.model, runner.ops, runner.arrays, proposer, fused_draw(plan.device), 384)
    with patch.object(Ops, "logits", autospec=True, side_effect=Ops.logits) as logits:
        prepared = gather(parts)
    calls = [call.args for call in logits.call_args_list]
    scored = {len(hidden) for ops, hidden in calls if ops is calls[-1][0]}  # the last are of prefill
    asked = served(plan, runner, count)
    names = prepared.keys()
    return {
        "name": name,
        "prepared": len(prepared.found),
        "asked": len(asked.found),
        "scored": sorted(scored),
        "missing": sorted(asked.keys() - names),
        "shared": shared_memory(plan),
        "live": activations(plan, runner),
        "unused": len(names - asked.keys()),
        "gates": sorted({key.partition("GATE=('constexpr', '")[2].partition("'")[0] for key in names} - {""}),
        "widths": sorted({key.partition("BM=('constexpr', ")[2].partition(")")[0] for key in names} - {""}),
    }


def compiled() -> dict:
    """Compiles a norm of two sizes, then again for another device, which finds them on disk; then one late."""
    from offroad.triton_kernels.norms_jit import norm, norm_kernel

    def ask(size: int) -> None:
        norm(torch.empty(2, size, device="meta"), torch.empty(size, device="meta"), 1e-6)

    counts, reports = [], []
    for _ in range(2):
        launches = warm.Launches()
        with warm.collect(launches):
            for size in (64, 128, 64):
                ask(size)
        made = warm.compile_all(launches, 2, lambda done, of: reports.append((done, of)), load=False)
        counts.append((len(launches.found), made.compiled, made.cached))
        norm_kernel.device_caches.clear()
    late = warm.Launches()
    with warm.collect(late):
        ask(256)
    for _ in range(2):  # as two engines of one process do
        warm.LATE.watch()
        warm.LATE.rest()
    warm.LATE.watch()
    for launch in [*late.found.values()] * 2:
        launch.compile(load=False)
    warm.LATE.rest()
    return {"counts": counts, "reports": reports, "late": warm.LATE.count}


if __name__ == "__main__":
    driver.set_active(Driver())
    dependent._supported = lambda: True  # as on the H100
    for name in sys.argv[2:]:
        print(json.dumps(compiled() if name == "compiled" else closed(name, int(sys.argv[1]))), flush=True)
