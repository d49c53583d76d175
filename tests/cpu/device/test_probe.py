"""The probe: capabilities from /proc/cpuinfo and compute capability, limits of control groups, what --device means."""

import sys
from types import SimpleNamespace

import pytest

from offroad.device import compiler, probe
from offroad.errors import SettingsError
from offroad.settings import Settings


def cpuinfo(*cores: str) -> str:
    return "\n\n".join(f"processor\t: {i}\nmodel name\t: Test CPU\nflags\t\t: {flags}" for i, flags in enumerate(cores))


def test_cpu_capabilities_are_those_of_every_core():
    assert probe.cpu_capabilities(cpuinfo("fpu avx2 fma f16c", "fpu avx2 fma")) == {"avx2", "fma"}


def test_avx512_needs_all_of_its_parts():
    assert "avx512" not in probe.cpu_capabilities(cpuinfo("avx2 avx512f"))
    full = probe.cpu_capabilities(cpuinfo("avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_tile amx_bf16 amx_int8"))
    assert {"avx512", "avx512_bf16", "amx"} <= full


def test_arm_features():
    assert probe.cpu_capabilities("processor : 0\nFeatures : fp asimd\n") == {"neon"}


def test_a_name_is_no_capability():
    assert probe.cpu_capabilities(cpuinfo("avx2x notavx2")) == set()


def test_cpu_name():
    assert probe.cpu_name(cpuinfo("fpu")) == "Test CPU"


@pytest.mark.parametrize("capability", sorted(probe.CUDA_CAPABILITIES))
def test_newer_devices_keep_what_the_first_tensor_cores_had(capability):
    assert "mma_f16" in probe.cuda_capabilities(capability)
    assert ("mma_bf16" in probe.cuda_capabilities(capability)) == (capability >= (8, 0))
    assert ("wgmma" in probe.cuda_capabilities(capability)) == (capability == (9, 0))


def test_an_unknown_compute_capability_is_not_guessed():
    with pytest.raises(SettingsError) as caught:
        probe.cuda_capabilities((6, 1))
    assert caught.value.found == "6.1"
    assert "7.0" in caught.value.accepted


def test_cgroup_v2_limits_of_the_group_and_those_above(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    proc.write_text("0::/a/b\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    (root / "a" / "memory.max").write_text("1073741824\n")
    (root / "a" / "cpu.max").write_text("150000 100000\n")
    assert probe.memory_limits(proc, root) == [1073741824]
    assert probe.usable_cores(proc, root) <= 2


def test_cgroup_v1_limits(tmp_path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "memory" / "job").mkdir(parents=True)
    (root / "cpu").mkdir()
    proc.write_text("4:memory:/job\n2:cpu,cpuacct:/\n0::/\n")
    (root / "memory" / "job" / "memory.limit_in_bytes").write_text("2147483648\n")
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (root / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert probe.memory_limits(proc, root) == [2147483648]
    assert probe.usable_cores(proc, root) == 1


def test_no_quota_leaves_the_affinity(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    free = probe.usable_cores(tmp_path / "cgroup", tmp_path)
    assert free == probe.usable_cores(tmp_path / "missing", tmp_path)
    assert free >= 1


def test_probe_of_this_cpu(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    profile = probe.probe("cpu")
    assert profile.kind == "cpu"
    assert profile.source == "probe"
    assert profile.memory > 2**28
    assert profile.tool("torch")


def test_memory_is_bounded_by_the_control_group(monkeypatch):
    monkeypatch.setattr(probe, "memory_limits", lambda: [2**28])
    assert probe.probe_cpu().memory == 2**28


def test_device_names(monkeypatch):
    monkeypatch.setattr(probe, "cuda_missing", lambda: "no device in this test")
    assert probe.resolve_device(Settings(model="m")).kind == "cpu"
    assert probe.resolve_device(Settings(model="m", device="cpu")).source == "probe"
    assert probe.resolve_device(Settings(model="m", device="v100-32gb")).source == "file"
    with pytest.raises(SettingsError, match="no device in this test"):
        probe.resolve_device(Settings(model="m", device="cuda"))
    with pytest.raises(SettingsError, match="gpu"):
        probe.resolve_device(Settings(model="m", device="gpu"))


def test_auto_takes_cuda_where_there_is_one(monkeypatch):
    import torch

    properties = SimpleNamespace(
        name="Test GPU", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132,
        shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20,
    )
    monkeypatch.setattr(probe, "cuda_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    profile = probe.resolve_device(Settings(model="m"))
    assert (profile.kind, profile.compute_capability, profile.units) == ("cuda", (9, 0), 132)
    assert profile.has("wgmma")
    assert profile.shared_per_block == 232448


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_cc_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", script(tmp_path / "mycc", "echo mycc 1.2; echo more") + " -m64")
    found = compiler.find_compiler()
    assert found.version == "mycc 1.2"
    assert found.command[1:] == ("-m64",)
    assert found.origin == "$CC"


def test_a_bad_cc_is_an_error_and_nothing_else_is_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", script(tmp_path / "bad", "exit 1"))
    with pytest.raises(SettingsError, match="CC"):
        compiler.find_compiler()


def test_compilers_on_the_path_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path / "clang", "echo clang 17")
    assert compiler.find_compiler().version == "clang 17"
    script(tmp_path / "cc", "exit 1")
    script(tmp_path / "gcc", "echo gcc 12")
    assert compiler.find_compiler().version == "gcc 12"


def test_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert compiler.find_compiler() is None
    assert "cc" not in dict(probe.toolchain())


def test_ziglang_is_the_last_resort(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "find_spec", lambda name: object())
    monkeypatch.setattr(compiler, "_version", lambda command: "zig 0.13" if command[0] == sys.executable else None)
    assert compiler.find_compiler().command == (sys.executable, "-m", "ziglang", "cc")
