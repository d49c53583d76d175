"""The entries of linears with a gated activation behind them in one kernel: a layer's own, and that of all that its
experts do. Triton is imported by `bind`."""

from __future__ import annotations

from functools import partial

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Bound, Problem, Registry
from offroad.triton_kernels.kernel import TritonKernel
from offroad.triton_kernels.linear import SHARED_OF, SORTED, W8A8
from offroad.triton_kernels.linear_pack import W4, W8
from offroad.triton_kernels.memory import split_bytes

EXPERTS = {"triton.grouped_w4": W4, "triton.grouped_w8": W8, "triton.grouped_dense": "dense"}
GATE_UP, DOWN = "grouped_linear:experts_gate_up", "grouped_linear:experts_down"
EXPERTS_PARTS: dict[str, tuple[str, ...]] = {
    GATE_UP: tuple(EXPERTS),
    "gated_activation:experts": ("triton.gated_activation",),
    DOWN: tuple(EXPERTS),
    "moe_combine": ("triton.moe_combine",),
}
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


def _experts_limits(device: DeviceProfile, problem: Problem) -> str | None:
    parts = dict(problem.parts)
    for part, accepted in EXPERTS_PARTS.items():
        if (found := parts.get(part, "")) not in accepted:
            return f"is for {', '.join(accepted)} as {part}; the plan has {found or 'no kernel'}"
    size = problem.size("n") // problem.size("experts") // 2
    return f"needs a multiple of {HALF} outputs of gate and up each, not {size:,}" if size % HALF else None


def _experts_shared(device: DeviceProfile, problem: Problem) -> int:
    parts = dict(problem.parts)
    return max(SHARED_OF[EXPERTS[parts[part]]] for part in (GATE_UP, DOWN))


def _bind_experts(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_grouped import experts
    from offroad.triton_kernels.linear_run import card_of

    return partial(experts, on=card_of(device))


def register(registry: Registry) -> None:
    """Adds the kernels; their ops must be there."""
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
    registry.add(
        TritonKernel(
            "triton.experts",
            "experts",
            _bind_experts,
            _experts_limits,
            _experts_shared,
            features=frozenset({"silu", "gelu_tanh", "shared"}),
            reason=f"the activation behind the first linear's sums, and once for both linears: {SORTED}",
            invariant=False,
            workspace=lambda device, problem: split_bytes(device.units),
        )
    )
