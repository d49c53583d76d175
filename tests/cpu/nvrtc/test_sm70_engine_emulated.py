"""An engine that runs by a V100's plan: whole models through emulated kernels, and when the engine refuses to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sm70_emulated import load, needs_compiler
from sm70_models import CONFIGS, PROMPT, answers, compare, engine_of

from offroad import engine as engine_module
from offroad.device import probe
from offroad.device.profile import DeviceProfile, load_profile
from offroad.errors import PlanError
from offroad.nvrtc import launch

V100, H100 = load_profile("v100-32gb"), replace(load_profile("h100-80gb"), name="Test H100", source="probe")


class _OnCpu:
    """torch, whose devices are all the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def device(self, kind: str) -> torch.device:
        return torch.device("cpu")


def has(monkeypatch: pytest.MonkeyPatch, host: DeviceProfile) -> None:
    monkeypatch.setattr(probe, "cuda_missing", lambda: None)
    monkeypatch.setattr(probe, "probe_cuda", lambda: host)


@needs_compiler
@pytest.mark.parametrize("family", CONFIGS)
def test_models_by_a_v100_s_plan_as_the_cpu_reference(family: str, request, monkeypatch):
    """With --thorough all of them; else the one with the most kinds of kernels."""
    if family != "qwen3_5_moe" and not request.config.getoption("--thorough"):
        pytest.skip("only with --thorough")
    reference = engine_of(CONFIGS[family], "cpu", kernel=["linear=torch.reference_linear"])
    has(monkeypatch, H100)
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(engine_module, "torch", _OnCpu())
    engine = engine_of(CONFIGS[family], "v100-32gb", enforce_eager=True)
    kernels = engine.plan.kernels()
    assert {"cuda.sm70_attention", "cuda.sm70_linear"} <= set(kernels)
    assert not [name for name in kernels if name.startswith("triton.") or "reference" in name]
    compare(engine, reference, CONFIGS[family], [PROMPT, PROMPT[3:9]], 3)
    long = [*PROMPT, *PROMPT, *PROMPT]  # of which the first chunk wants nothing
    assert answers(engine, [long], 2) == answers(reference, [long], 2)


def test_who_stands_in_is_said(monkeypatch):
    has(monkeypatch, H100)
    device = probe.runnable(V100)
    assert device.name == "v100-32gb, run on Test H100"
    assert "plan for v100-32gb, run on Test H100" in device.notes[0]
    assert "speeds say nothing" in device.notes[0]
    assert (device.memory, device.units, device.compute_capability) == (V100.memory, 80, (7, 0))
    assert device.bandwidth == 0
    assert probe.runnable(device) is device
    has(monkeypatch, replace(V100, name="Tesla V100", source="probe"))
    own = probe.runnable(V100)
    assert own.bandwidth == V100.bandwidth
    assert "speeds" not in own.notes[0]


@pytest.mark.parametrize(
    ("device", "host", "reason"),
    [
        (V100, None, "no device in this test"),
        (load_profile("cpu-avx2"), H100, "only CUDA"),
        (load_profile("rtx5090"), H100, "12.0; Test H100 has 9.0"),
        (replace(V100, capabilities=V100.capabilities | {"mma_fp8"}), H100, "mma_fp8, which"),
        (replace(V100, memory=1 << 37), H100, "bytes of memory"),
        (replace(V100, shared_per_block=1 << 20), H100, "shared memory a block; Test H100 has 232,448"),
    ],
)
def test_profiles_that_nothing_here_can_stand_in_for(device, host, reason: str, monkeypatch):
    monkeypatch.setattr(probe, "cuda_missing", lambda: None if host else "no device in this test")
    monkeypatch.setattr(probe, "probe_cuda", lambda: host)
    with pytest.raises(PlanError, match=reason):
        probe.runnable(device)


def test_an_engine_names_the_reason(monkeypatch):
    monkeypatch.setattr(probe, "cuda_missing", lambda: "no device in this test")
    with pytest.raises(PlanError, match=r"v100-32gb.*no device in this test.*offroad plan"):
        engine_of(CONFIGS["llama"], "v100-32gb")


def test_a_stand_in_needs_no_nvrtc_of_its_own():
    """PTX may have come along in the cache; a real V100 without NVRTC 12 is told what to install."""
    from offroad.nvrtc.entries import KERNELS
    from offroad.ops.spec import Problem

    norm = next(kernel for kernel in KERNELS if kernel.op == "norm")
    problem = Problem("norm", "decode", "float16", sizes=(("hidden", 64),))
    assert norm.check(replace(V100, source="stand-in"), problem).ok
    assert not norm.check(replace(V100, source="probe"), problem).ok
