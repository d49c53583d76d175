"""Profiles that stand in for devices: every one loads, facts that plans rest on, and refusals."""

from dataclasses import replace

import pytest

from offroad.device.probe import CPU_CAPABILITIES, CUDA_CAPABILITIES
from offroad.device.profile import GIB, compared, load_profile, parse_profile, profile_names
from offroad.errors import SettingsError


def test_the_profiles_that_come_along():
    assert profile_names() == ["cpu-avx2", "gb10", "h100-80gb", "h200-141gb", "rtx5090", "rtxpro6000", "v100-32gb"]


@pytest.mark.parametrize("name", profile_names())
def test_profile_loads_and_is_complete(name):
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source == "file"
    assert profile.memory > 8 * GIB
    assert profile.bandwidth > 10e9
    assert dict(profile.flops)["float32"] > 1e11
    if profile.kind == "cuda":
        assert profile.capabilities == set(CUDA_CAPABILITIES[profile.compute_capability])
        assert profile.shared_per_block > 48 * 1024
    else:
        assert profile.capabilities <= set(CPU_CAPABILITIES)


def test_volta():
    v100 = load_profile("v100-32gb")
    assert v100.compute_capability == (7, 0)
    assert v100.has("mma_f16")
    assert not any(v100.has(name) for name in ("mma_bf16", "mma_int8", "mma_fp8", "cp_async", "tma"))
    assert v100.shared_per_block == 98304
    assert 31 * GIB < v100.memory < 32 * GIB
    assert v100.bandwidth == 900e9


def test_hopper_has_fp8_in_wgmma_only():
    h100 = load_profile("h100-80gb")
    assert h100.has("wgmma")
    assert h100.has("wgmma_fp8")
    assert not h100.has("mma_fp8")
    assert h100.shared_per_block == 232448


@pytest.mark.parametrize("name", ["rtx5090", "rtxpro6000", "gb10"])
def test_consumer_blackwell_has_fp4_but_no_wgmma(name):
    profile = load_profile(name)
    assert profile.has("mma_nvfp4")
    assert profile.has("mma_fp8")
    assert not profile.has("wgmma")
    assert profile.shared_per_block == 101376


def test_geforce_accumulates_fp16_at_half_rate():
    assert dict(load_profile("rtx5090").flops)["float16"] < 0.5 * dict(load_profile("rtxpro6000").flops)["float16"]


def test_unknown_name_lists_what_is_accepted():
    with pytest.raises(SettingsError) as caught:
        load_profile("rtx4090")
    assert "v100-32gb" in caught.value.accepted
    assert caught.value.found == "rtx4090"


def test_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nkind = "cpu"\nmemory_gib = 2\ncapabilities = ["avx2"]\n')
    assert load_profile(str(path)).memory == 2 * GIB
    with pytest.raises(SettingsError, match="no such file"):
        load_profile(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nkind = "cpu"\nmemory_gib = 2\ncapabilities = []\nmemory = 3\n', "unknown key"),
        ('name = "x"\nkind = "cpu"\ncapabilities = []\n', "no memory_gib"),
        ('name = 3\nkind = "cpu"\nmemory_gib = 2\ncapabilities = []\n', "name"),
        ("name = \n", "TOML"),
    ],
)
def test_bad_files_are_refused(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_profile(text, "test")


def test_a_probed_device_takes_the_rates_of_its_kind_and_tells_what_differs():
    known = load_profile("rtx5090")
    same = compared(replace(known, name="NVIDIA GeForce RTX 5090", bandwidth=0.0, flops=(), source="probe"))
    assert (same.bandwidth, same.flops) == (known.bandwidth, known.flops)
    assert same.notes == ("rates are those of the profile rtx5090; nothing was measured",)
    other = compared(replace(known, units=150, memory=known.memory // 2, capabilities=frozenset({"mma_f16"}), flops=()))
    text = "\n".join(other.notes)
    assert "150 SMs; the profile rtx5090 says 170" in text
    assert "GiB of memory" in text
    assert "mma_fp8" in text
    assert (
        compared(replace(known, memory=96 * 1024**3)).notes[0].startswith("rates are those of the profile rtxpro6000")
    )
    h200 = compared(replace(load_profile("h100-80gb"), memory=143_155 * 1024**2, l2=60 * 1024**2))
    assert h200.notes == ("rates are those of the profile h200-141gb; nothing was measured",)
    assert h200.bandwidth > 1.4 * load_profile("h100-80gb").bandwidth
    unknown = compared(replace(known, compute_capability=(8, 6), bandwidth=0.0))
    assert unknown.bandwidth == 0.0
    assert "no profile of devices like" in unknown.notes[0]
