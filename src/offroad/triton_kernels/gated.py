"""The entry of the linear with a gated activation behind it in one kernel. Triton is imported by `bind`."""

from __future__ import annotations

from functools import partial

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Bound, Problem, Registry
from offroad.triton_kernels.kernel import TritonKernel
from offroad.triton_kernels.linear import SHARED_OF, W8A8
from offroad.triton_kernels.linear_pack import W4, W8
from offroad.triton_kernels.memory import split_bytes

LINEARS = {"triton.linear_w4": W4, "triton.linear_w8": W8, W8A8: W8, "triton.linear_dense": "dense"}
MOST = 64  # tokens; for more the linear may have other ways, and beside it the activation is small
# For fewer tokens of 4-bit weights two kernels are faster: half records of gate and of up are shorter runs of memory.
# gate_up of Qwen3.5-27B on an H100, linear and activation against this: 39.9 and 41.3 us for 8 tokens, 70.8 and 68.4
# for 64.
LEAST_4_BIT = 17
HALF = 32  # outputs of the gate that a program has at least, and as many of up


def _limits(device: DeviceProfile, problem: Problem) -> str | None:
    parts = dict(problem.parts)
    if (linear := parts.get("linear:gate_up", "")) not in LINEARS:
        return f"is {', '.join(LINEARS)} with an activation behind it; the plan has {linear or 'no kernel'}"
    if (activation := parts.get("gated_activation", "")) != "triton.gated_activation":
        return f"does what triton.gated_activation does; the plan has {activation or 'no kernel'}"
    size = problem.size("n") // 2
    return f"needs a multiple of {HALF} outputs of gate and up each, not {size:,}" if size % HALF else None


def _shared(device: DeviceProfile, problem: Problem) -> int:
    return SHARED_OF[LINEARS[dict(problem.parts)["linear:gate_up"]]]


def _bind(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_gated import gated_linear
    from offroad.triton_kernels.linear_run import card_of

    return partial(gated_linear, on=card_of(device))


def register(registry: Registry) -> None:
    """Adds the kernel; the op must be there."""
    registry.add(
        TritonKernel(
            "triton.gated_linear",
            "gated_linear",
            _bind,
            _limits,
            _shared,
            features=frozenset({"bias", "silu", "gelu_tanh"}),
            reason=f"up to {MOST} tokens (dense weights: 16; 4-bit ones: from {LEAST_4_BIT}) by the linear's kernel, "
            "the activation behind its sums; others by the kernels of linear:gate_up and gated_activation",
            invariant=False,
            workspace=lambda device, problem: split_bytes(device.units),
        )
    )
