"""Entry of the Gated DeltaNet kernels: which problems they take, and the shared memory of their largest tile."""

from __future__ import annotations

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Problem, Registry
from offroad.triton_kernels.kernel import TritonKernel
from offroad.triton_kernels.rows import function


def _limits(device: DeviceProfile, problem: Problem) -> str | None:
    sizes = dict(problem.sizes)
    longest = max(sizes.get("key_dim", 0), sizes.get("value_dim", 0))
    return f"holds states up to 128 x 128 in registers; asked: {longest}" if longest > 128 else None


def register(registry: Registry) -> None:
    """Adds the kernel, for verify rows and chunks alike."""
    gates = frozenset({"silu", "sigmoid"})
    registry.add(
        TritonKernel("triton.gated_delta", "gated_delta", function("delta_jit", "gated_delta"), _limits, features=gates)
    )
