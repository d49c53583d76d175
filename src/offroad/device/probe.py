"""The device of this machine as a `DeviceProfile`, and what `--device` means."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from offroad.device.profile import GIB, DeviceProfile, compared, load_profile
from offroad.errors import PlanError, SettingsError
from offroad.native.compile import find_compiler
from offroad.settings import Settings

# What /proc/cpuinfo must list for a capability. Code compiled for AVX-512 uses its byte/word and short forms too.
CPU_CAPABILITIES: dict[str, frozenset[str]] = {
    "avx2": frozenset({"avx2"}),
    "fma": frozenset({"fma"}),
    "f16c": frozenset({"f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_vnni": frozenset({"avx512_vnni"}),
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
    "neon": frozenset({"asimd"}),
}

_AMPERE = ("mma_f16", "mma_bf16", "mma_tf32", "mma_int8", "cp_async")
_CONSUMER_BLACKWELL = (*_AMPERE, "cvt_e4m3", "mma_fp8", "mma_mxfp4", "mma_nvfp4", "tma")
_DATACENTRE_BLACKWELL = (*_AMPERE, "cvt_e4m3", "mma_fp8", "tma", "tcgen05", "tcgen05_fp8", "tcgen05_nvfp4")

# Units by compute capability, from NVIDIA's tables and from what ptxas assembles. On 9.0 fp8 is real in wgmma only.
CUDA_CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("mma_f16",),
    (7, 2): ("mma_f16", "mma_int8"),
    (7, 5): ("mma_f16", "mma_int8"),
    (8, 0): _AMPERE,
    (8, 6): _AMPERE,
    (8, 7): _AMPERE,
    (8, 9): (*_AMPERE, "cvt_e4m3", "mma_fp8"),
    (9, 0): (*_AMPERE, "cvt_e4m3", "tma", "wgmma", "wgmma_fp8"),
    (10, 0): _DATACENTRE_BLACKWELL,
    (10, 3): _DATACENTRE_BLACKWELL,
    (12, 0): _CONSUMER_BLACKWELL,
    (12, 1): _CONSUMER_BLACKWELL,
}


def resolve_device(settings: Settings) -> DeviceProfile:
    """The device that `settings.device` names: `auto` (CUDA if there is one, else CPU), `cpu`, `cuda`, or a profile.

    A profile (source "file") stands in for a device when planning; `runnable` says what an engine makes of it. Raises
    SettingsError for an unknown name, and where `cuda` is named and there is none.
    """
    return probe(settings.device) if settings.device in ("auto", "cpu", "cuda") else load_profile(settings.device)


def runnable(device: DeviceProfile) -> DeviceProfile:
    """What an engine runs by: a probed device itself, or a profile that the CUDA device here can stand in for.

    Then kernels, tiles and the memory budget are the profile's, which is what makes a plan for a V100 testable on a
    newer GPU; the name and a note say whose silicon it is, and rates are unknown unless it is of the same generation.
    Raises PlanError where the device here cannot do what the profile's kernels may ask for.
    """
    if device.source != "file":
        return device
    reason, host = cuda_missing() if device.kind == "cuda" else "only CUDA devices can be stood in for", None
    if reason is None:
        host = probe_cuda()
        reason = _stand_in_reason(device, host)
    if reason is not None:
        raise PlanError(
            f"--device {device.name}: running by a profile",
            found=reason,
            accepted="a CUDA device at least as new, with every unit and as much memory; or auto, cpu, cuda",
            next=f"`offroad plan --device {device.name}` shows the plan",
        )
    assert host is not None, "without a reason there is a device"
    same = host.compute_capability == device.compute_capability
    newer = (
        "" if same else "; kernels are compiled for it and translated by the driver, and speeds say nothing about it"
    )
    return replace(
        device,
        name=f"{device.name}, run on {host.name}",
        bandwidth=device.bandwidth if same else 0.0,
        flops=device.flops if same else (),
        toolchain=host.toolchain,
        source="stand-in",
        notes=(f"plan for {device.name}, run on {host.name}{newer}",),
    )


def _stand_in_reason(device: DeviceProfile, host: DeviceProfile) -> str | None:
    """Why `host` cannot run what is planned for `device`, or None if it can."""
    ours, theirs = host.compute_capability or (0, 0), device.compute_capability or (0, 0)
    if theirs > ours:
        return f"compute capability {theirs[0]}.{theirs[1]}; {host.name} has {ours[0]}.{ours[1]}"
    if lacks := sorted(device.capabilities - host.capabilities):
        return f"{', '.join(lacks)}, which {host.name} lacks"
    for name, unit in (("memory", "bytes of memory"), ("shared_per_block", "bytes of shared memory a block")):
        needed, there = getattr(device, name), getattr(host, name)
        if needed > there:
            return f"{needed:,} {unit}; {host.name} has {there:,}"
    return None


def probe(kind: str = "auto") -> DeviceProfile:
    """What this machine's CPU or first CUDA device can do. Raises SettingsError if there is no such device."""
    if kind not in ("auto", "cpu", "cuda"):
        raise SettingsError("device to probe", found=kind, accepted="auto, cpu, cuda")
    if kind == "cpu":
        return probe_cpu()
    reason = cuda_missing()
    if reason is None:
        return probe_cuda()
    if kind == "cuda":
        raise SettingsError(
            "--device cuda",
            found=reason,
            accepted="a CUDA device that torch can use",
            next="use --device cpu, or see `offroad doctor`",
        )
    return probe_cpu()


def cuda_missing() -> str | None:
    """Why torch cannot use CUDA here, or None if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device"
    return None


def probe_cuda(index: int = 0) -> DeviceProfile:
    """The profile of a CUDA device: sizes from torch, capabilities by compute capability, rates from the profile of its
    kind. A device that shares the CPU's memory has what of it is available."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    memory, notes = properties.total_memory, ()
    if getattr(properties, "is_integrated", 0):
        memory = min(memory, available_memory())
        notes = (f"memory is shared with the CPU: {memory / GIB:.1f} GiB of it is available now",)
    probed = DeviceProfile(
        name=properties.name,
        kind="cuda",
        memory=memory,
        capabilities=cuda_capabilities(capability),
        compute_capability=capability,
        units=properties.multi_processor_count,
        shared_per_block=getattr(properties, "shared_memory_per_block_optin", 0),
        l2=properties.L2_cache_size,
        toolchain=toolchain(cuda=torch.version.cuda),
        source="probe",
        notes=notes,
    )
    return compared(probed)


def available_memory() -> int:
    """Bytes that this process could still take of the machine's memory."""
    import psutil

    return min([psutil.virtual_memory().available, *memory_limits()])


def cuda_capabilities(capability: tuple[int, int]) -> frozenset[str]:
    """Units of a compute capability. Raises SettingsError for one that is not in the table: nothing is guessed."""
    if capability not in CUDA_CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CUDA_CAPABILITIES)
        raise SettingsError(
            "compute capability of the CUDA device",
            found=f"{capability[0]}.{capability[1]}",
            accepted=known,
            next="use --device cpu, or report the device with `offroad doctor --json`",
        )
    return frozenset(CUDA_CAPABILITIES[capability])


def probe_cpu() -> DeviceProfile:
    """The CPU that this process may use: its cores and memory after affinity and control group limits."""
    import psutil

    text = _read("/proc/cpuinfo")
    return DeviceProfile(
        name=cpu_name(text),
        kind="cpu",
        memory=min([psutil.virtual_memory().total, *memory_limits()]),
        capabilities=cpu_capabilities(text),
        units=usable_cores(),
        toolchain=toolchain(),
        source="probe",
    )


def cpu_capabilities(cpuinfo: str) -> frozenset[str]:
    """Capabilities by the flags that every core lists in the text of /proc/cpuinfo."""
    listed = [set(value.split()) for key, value in _entries(cpuinfo) if key in ("flags", "Features")]
    if not listed:
        return frozenset({"neon"}) if platform.machine() in ("arm64", "aarch64") else frozenset()
    common = set.intersection(*listed)
    return frozenset(name for name, needed in CPU_CAPABILITIES.items() if needed <= common)


def cpu_name(cpuinfo: str) -> str:
    """The model name of the first core, or the machine's architecture."""
    return next((value for key, value in _entries(cpuinfo) if key == "model name"), platform.machine())


def memory_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory limits in bytes of this process's control groups (versions 1 and 2), the own one and those above it."""
    limits = []
    for folder, name in _cgroup_files(_read(proc), root, "memory", "memory.limit_in_bytes", "memory.max"):
        text = _read(folder / name).strip()
        # Version 1 says "no limit" with a number close to 2^63.
        if text.isdigit() and int(text) < 2**60:
            limits.append(int(text))
    return limits


def usable_cores(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores after CPU affinity and control group quotas, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, name in _cgroup_files(_read(proc), root, "cpu", "cpu.cfs_quota_us", "cpu.max"):
        words = _read(folder / name).split()
        if name == "cpu.cfs_quota_us":
            words += _read(folder / "cpu.cfs_period_us").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            cores = min(cores, -(-int(words[0]) // int(words[1])))
    return max(1, cores)


def _cgroup_files(text: str, root: Path, controller: str, v1_name: str, v2_name: str) -> list[tuple[Path, str]]:
    """(folder, file name) where limits of a controller may stand; inside a container the own group may be the root."""
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, name = root, v2_name
        elif controller in controllers.split(","):
            base, name = root / controller, v1_name
        else:
            continue
        folder = base / path.lstrip("/")
        folders = [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
        found += [(place, name) for place in folders]
    return found


def toolchain(**more: str | None) -> tuple[tuple[str, str], ...]:
    """Versions of what kernels are built with: torch, triton, NVRTC (the one that cuda-bindings loads), the C compiler,
    and `more`, as far as they are there."""
    found: dict[str, str | None] = {name: package_version(name) for name in ("torch", "triton")}
    bindings = package_version("cuda-bindings") or ""
    package = "nvidia-cuda-nvrtc-cu12" if bindings.startswith("12.") else "nvidia-cuda-nvrtc"
    found["nvrtc"] = package_version(package) if bindings else None
    compiler = find_compiler()
    found["cc"] = compiler.version if compiler else None
    return tuple(sorted((name, value) for name, value in (found | more).items() if value))


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _entries(cpuinfo: str) -> list[tuple[str, str]]:
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())]


def _read(path: str | Path) -> str:
    """A file's text; empty if this system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
