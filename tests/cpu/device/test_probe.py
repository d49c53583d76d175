"""The probe: capabilities from /proc/cpuinfo and compute capability, limits of control groups, what --device means."""

from types import SimpleNamespace

import pytest

from offroad.device import probe
from offroad.errors import SettingsError
from offroad.settings import Settings


def cpuinfo(*cores: str) -> str:
    return "\n\n".join(f"processor\t: {i}\nmodel name\t: Test CPU\nflags\t\t: {flags}" for i, flags in enumerate(cores))


def test_cpu_capabilities_are_those_of_every_core():
    assert probe.cpu_capabilities(cpuinfo("fpu avx2 fma f16c", "fpu avx2 fma")) == {"avx2", "fma"}


def test_avx512_needs_all_of_its_parts():
    assert "avx512" not in probe.cpu_capabilities(cpuinfo("avx2 avx512f"))
    full = probe.cpu_capabilities(
        cpuinfo("avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_tile amx_bf16 amx_int8")
    )
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
        name="Test GPU",
        major=9,
        minor=0,
        total_memory=80 * 2**30,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
    )
    monkeypatch.setattr(probe, "cuda_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    profile = probe.resolve_device(Settings(model="m"))
    assert (profile.kind, profile.compute_capability, profile.units) == ("cuda", (9, 0), 132)
    assert profile.has("wgmma")
    assert profile.shared_per_block == 232448


def test_the_compiler_is_part_of_the_toolchain(monkeypatch):
    monkeypatch.setattr(probe, "find_compiler", lambda: SimpleNamespace(version="gcc 12"))
    assert dict(probe.toolchain(cuda="12.9"))["cc"] == "gcc 12"
    assert dict(probe.toolchain(cuda="12.9"))["cuda"] == "12.9"
    monkeypatch.setattr(probe, "find_compiler", lambda: None)
    assert "cc" not in dict(probe.toolchain(cuda=None))
    assert "cuda" not in dict(probe.toolchain(cuda=None))
