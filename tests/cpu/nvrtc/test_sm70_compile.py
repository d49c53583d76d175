"""SM70 kernels compile without a GPU, within a V100's limits, with tensor-core instructions; caches and refusals.

Kernels that a V100 spends its time in are compiled here; `python -m offroad.nvrtc.report` does it for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sm70_models import CONFIGS

from offroad.device.profile import load_profile
from offroad.engine import make_plan
from offroad.errors import OffroadError
from offroad.evidence.kernel_check import standard
from offroad.nvrtc import attention, compile, delta, launch, linear, rows, workspace
from offroad.nvrtc.compile import KernelCompileError, Source, compiled
from offroad.nvrtc.entries import KERNELS
from offroad.nvrtc.launch import LaunchError, Shapes
from offroad.nvrtc.report import SHARED, reports
from offroad.nvrtc.variants import sources, variants
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.run.bind import prepare
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

try:
    compile.include_folders()
    HAS_NVRTC = compile.toolchain() is not None and compile.supports("sm_70")
except OffroadError:
    HAS_NVRTC = False
needs_nvrtc = pytest.mark.skipif(not HAS_NVRTC, reason="no NVRTC 12 for sm_70: pip install 'offroad[sm70]'")
HOT = (
    attention.source(128, 1, False),
    attention.source(256, 8, True),
    linear.source("q4", 1),
    linear.source("f8", 8),
    delta.source(128, 128, 4),
    delta.chunk_source(128, 128),
    workspace.source("q4"),
    rows.NORM,
    rows.GATE,
    rows.ROPE,
)
TURING = (attention.source(64, 1, False), rows.ROPE)


@needs_nvrtc
@pytest.mark.parametrize(("target", "chosen"), [("sm_70", HOT), ("sm_75", TURING)], ids=["sm_70", "sm_75"])
def test_hot_kernels_fit_and_do_not_spill(target: str, chosen: tuple[Source, ...]):
    pytest.importorskip("triton")  # its package has the disassembler
    wanted = [variant for variant in variants() if variant.source in chosen]
    assert {variant.source for variant in wanted} == set(chosen)
    for report in reports(target, wanted):
        assert report.spilled == 0, report
        assert report.blocks >= 1, report
        assert (report.tensor_instructions > 0) == report.variant.tensor, report


def test_every_kernel_fits_the_shared_memory_of_a_v100():
    assert all(source.shared <= SHARED["sm_70"] for source in sources())


@needs_nvrtc
def test_a_cache_is_read_and_filled_and_stands_in_for_a_compiler(tmp_path: Path, monkeypatch):
    first = compiled(rows.GATE, "compute_70", tmp_path)
    assert b".target sm_70" in first.code
    assert first.toolchain.startswith("12.")
    monkeypatch.setattr(compile, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert compiled(rows.GATE, "compute_70", tmp_path) == first
    monkeypatch.setattr(compile, "toolchain", lambda: "13.0")
    monkeypatch.setattr(compile, "supports", lambda target: False)
    assert compiled(rows.GATE, "compute_70", tmp_path) == first
    other = replace(rows.GATE, defines=(("ANYTHING", 1),))
    assert other.digest() != rows.GATE.digest()
    with pytest.raises(KernelCompileError, match=r"13\.0.*--export"):
        compiled(other, "compute_70", tmp_path)


@needs_nvrtc
def test_what_nvrtc_says_is_in_the_error(tmp_path: Path):
    with pytest.raises(KernelCompileError, match="static assertion"):
        compiled(replace(rows.GATE, shared=16), "sm_70", tmp_path)


def test_shapes_are_checked_by_name():
    shapes = Shapes.of("op", x="tokens 4", y="tokens _")
    import torch

    assert shapes.check(x=torch.zeros(3, 4), y=torch.zeros(3, 9)) == {"tokens": 3}
    with pytest.raises(LaunchError, match="op: y"):
        shapes.check(x=torch.zeros(3, 4), y=torch.zeros(2, 9))
    with pytest.raises(LaunchError, match="op: x"):
        shapes.check(x=torch.zeros(3, 5))
    with pytest.raises(LaunchError, match="tokens, 4"):
        shapes.check(x=torch.zeros(3))


def test_entries_are_for_volta_in_fp16():
    by_name = {kernel.name: kernel for kernel in KERNELS}
    sizes = (("block", 64), ("head_dim", 256), ("heads", 24), ("kv_heads", 4))
    problem = Problem("attention", "decode", "float16", "float8_e5m2", sizes)
    kernel = by_name["cuda.sm70_attention"]
    v100 = load_profile("v100-32gb")
    assert kernel.check(v100, problem).ok
    for device, changed, reason in (
        (load_profile("h100-80gb"), problem, "7.0, 7.5"),
        (load_profile("cpu-avx2"), problem, "CUDA"),
        (v100, replace(problem, dtype="bfloat16"), "float16"),
        (v100, replace(problem, kv_dtype="float8_e4m3fn"), "float8_e5m2"),
        (v100, replace(problem, features=frozenset({"sinks"})), "no sinks"),
        (v100, replace(problem, sizes=(("head_dim", 80),)), "asked: 80"),
        (replace(v100, source="probe"), problem, "offroad"),
        (replace(v100, shared_per_block=40_000), problem, "40,000"),
    ):
        verdict = kernel.check(device, changed)
        assert not verdict.ok
        assert reason in verdict.reason
    weight = Problem("linear", "decode", "float16", sizes=(("k", 5120), ("n", 64)), stored=("affine4.x-g128",))
    linears = by_name["cuda.sm70_linear"]
    assert linears.check(v100, weight).ok
    assert not linears.check(replace(v100, compute_capability=(7, 5)), weight).ok
    assert "actorder" in linears.check(v100, replace(weight, stored=("affine4.x-g128+order",))).reason
    assert "dense" in linears.check(v100, replace(weight, stored=("bf16",))).reason


def test_what_is_exported_is_all_that_the_doctor_and_small_models_load(monkeypatch):
    """So that a machine whose NVRTC cannot compile for sm_70 runs them on what came along."""
    loaded = set()
    monkeypatch.setattr(launch, "load", lambda source, *_, **__: loaded.add(source))
    registry, v100 = default_registry(), load_profile("v100-32gb")
    for subject in standard(registry, v100):
        registry.kernels[subject.kernel].prepare(v100, subject.problem)
    for config in CONFIGS.values():
        settings = Settings.of(model="dummy", device="v100-32gb", max_model_len=256, max_num_seqs=3)
        prepare(make_plan(settings, DummySource(config, "cpu", "w4a16-g32")), registry)
    assert loaded <= set(sources()), [source.label for source in loaded - set(sources())]
    assert len(loaded) > 40
