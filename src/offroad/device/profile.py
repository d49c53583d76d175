"""What a device can do, as a frozen value: probed from the machine, or read from a file that stands in for it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from offroad.errors import SettingsError

GIB = 1024**3


@dataclass(frozen=True)
class DeviceProfile:
    """Capabilities, sizes and rates of one device.

    `capabilities` names instructions and units (`mma_f16`, `mma_bf16`, `mma_fp8`, `mma_nvfp4`, `cvt_e4m3`, `cp_async`,
    `tma`, `wgmma`; on CPUs `avx2`, `fma`, `avx512`, `avx512_bf16`, `amx`). `memory` and `shared_per_block` are bytes,
    `bandwidth` bytes per second, `flops` dense operations per second by dtype. `toolchain` holds versions by name
    (`cc`, `torch`, `triton`, `nvrtc`). `source` says where values come from: `file`, `probe`, or `stand-in` for a file
    by which another device runs; `notes` say how a probed device differs from the profile of its kind.
    """

    name: str
    kind: str  # "cpu" or "cuda"
    memory: int
    capabilities: frozenset[str]
    compute_capability: tuple[int, int] | None = None
    units: int = 1  # SMs, or cores
    bandwidth: float = 0.0
    flops: tuple[tuple[str, float], ...] = ()
    shared_per_block: int = 0
    l2: int = 0
    toolchain: tuple[tuple[str, str], ...] = ()
    source: str = "file"
    notes: tuple[str, ...] = ()

    def has(self, capability: str) -> bool:
        return capability in self.capabilities

    def tool(self, name: str) -> str | None:
        return dict(self.toolchain).get(name)


def profile_names() -> list[str]:
    """Names of the profiles that come with offroad."""
    folder = resources.files("offroad.device") / "profiles"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_profile(name: str) -> DeviceProfile:
    """A profile by name, or from a TOML file. Raises SettingsError for an unknown name or a bad file."""
    path = Path(name)
    if name.endswith(".toml"):
        if not path.is_file():
            raise SettingsError("device profile file", found=f"{name} (no such file)", accepted="a TOML file")
        text = path.read_text()
    elif name in profile_names():
        text = (resources.files("offroad.device") / "profiles" / f"{name}.toml").read_text()
    else:
        known = ", ".join(["auto", "cpu", "cuda", *profile_names()])
        accepted = f"{known}, or a path ending in .toml"
        raise SettingsError("device", found=name, accepted=accepted, next="see `offroad doctor`")
    return parse_profile(text, where=name)


def parse_profile(text: str, where: str) -> DeviceProfile:
    """A profile from TOML text; every key must be known and of its type. Raises SettingsError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"device profile {where}", found=str(error), accepted="valid TOML") from error
    needed = {"name": str, "kind": str, "memory_gib": (int, float), "capabilities": list}
    optional = {
        "compute_capability": list,
        "units": int,
        "bandwidth_gb_s": (int, float),
        "tflops": dict,
        "shared_per_block": int,
        "l2_mib": (int, float),
        "toolchain": dict,
    }
    for key, value in data.items():
        expected = needed.get(key) or optional.get(key)
        if expected is None:
            raise SettingsError(
                f"device profile {where}: key {key!r}", found="unknown key", accepted=", ".join([*needed, *optional])
            )
        if not isinstance(value, expected):
            raise SettingsError(f"device profile {where}: key {key!r}", found=repr(value), accepted=str(expected))
    if missing := [key for key in needed if key not in data]:
        raise SettingsError(f"device profile {where}", found=f"no {', '.join(missing)}", accepted=", ".join(needed))
    capability = data.get("compute_capability")
    return DeviceProfile(
        name=data["name"],
        kind=data["kind"],
        memory=int(data["memory_gib"] * GIB),
        capabilities=frozenset(data["capabilities"]),
        compute_capability=(capability[0], capability[1]) if capability else None,
        units=data.get("units", 1),
        bandwidth=data.get("bandwidth_gb_s", 0) * 1e9,
        flops=tuple(sorted((k, v * 1e12) for k, v in data.get("tflops", {}).items())),
        shared_per_block=data.get("shared_per_block", 0),
        l2=int(data.get("l2_mib", 0) * 1024**2),
        toolchain=tuple(sorted(data.get("toolchain", {}).items())),
    )


def compared(probed: DeviceProfile) -> DeviceProfile:
    """A probed device with the rates of the profile of its kind (same compute capability, and the nearest memory), and
    notes on what differs; as it is if there is no such profile."""
    kin = [load_profile(name) for name in profile_names()]
    kin = [known for known in kin if known.kind == "cuda" and known.compute_capability == probed.compute_capability]
    if not kin:
        return replace(probed, notes=(*probed.notes, f"no profile of devices like {probed.name}: rates are unknown"))
    known = min(kin, key=lambda profile: abs(profile.memory - probed.memory))
    notes = [f"rates are those of the profile {known.name}; nothing was measured"]
    for name, unit in (("units", "SMs"), ("shared_per_block", "bytes of shared memory a block"), ("l2", "bytes of L2")):
        ours, theirs = getattr(probed, name), getattr(known, name)
        if ours and theirs and abs(ours / theirs - 1) > 0.02:
            notes.append(f"{probed.name} has {ours:,} {unit}; the profile {known.name} says {theirs:,}")
    if not 0.9 < probed.memory / known.memory < 1.1:
        notes.append(f"{probed.memory / GIB:.1f} GiB of memory; the profile {known.name} says {known.memory / GIB:.1f}")
    if probed.capabilities != known.capabilities:
        odd = ", ".join(sorted(probed.capabilities ^ known.capabilities))
        notes.append(f"capabilities that only the device or the profile {known.name} names: {odd}")
    return replace(probed, bandwidth=known.bandwidth, flops=known.flops, notes=(*probed.notes, *notes))
