"""Entries of the kernels that work row by row: norms, rope, activations, embeddings, routing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Bound, Problem, Registry
from offroad.quant.packed import PER_BYTE
from offroad.triton_kernels.kernel import TritonKernel

OF_ROPE = frozenset({"qk_norm", "v_norm", "k_eq_v", "q_only", "output_gate", "mrope"})
LONGEST = 16384  # elements of a row that is held in registers
READ_PAGES = ("triton.paged_decode", "hopper.paged_decode")  # attention that needs no keys and values beside them


def function(module: str, name: str) -> Callable[[DeviceProfile, Problem], Bound]:
    """A `bind` that gives the function `name` of a module of this package, imported then."""

    def bind(device: DeviceProfile, problem: Problem) -> Bound:
        return getattr(import_module(f"offroad.triton_kernels.{module}"), name)

    return bind


def at_most(size: str, longest: int) -> Callable[[DeviceProfile, Problem], str | None]:
    """Limits: the size of that name fits into one program."""

    def limits(device: DeviceProfile, problem: Problem) -> str | None:
        found = dict(problem.sizes).get(size, 0)
        return f"holds {size} <= {longest:,} in registers; asked: {found:,}" if found > longest else None

    return limits


def rope_shared(device: DeviceProfile, problem: Problem) -> int:
    """Bytes through which a tile of four heads in fp32 changes its layout."""
    return 16 * (1 << (problem.size("head_dim") - 1).bit_length())


def _stored_pages(device: DeviceProfile, problem: Problem) -> str | None:
    if (found := dict(problem.parts).get("attention", "")) not in READ_PAGES:
        return f"is for {' and '.join(READ_PAGES)}, which read pages alone; the plan has {found or 'no kernel'}"
    return at_most("head_dim", 1024)(device, problem)


def _dense_only(device: DeviceProfile, problem: Problem) -> str | None:
    packed = [kind for kind in problem.stored if kind.partition(".")[0] in ("gguf", *PER_BYTE)]
    return f"reads dense rows; stored: {packed[0]}" if packed else None


def register(registry: Registry) -> None:
    """Adds a kernel for each op; but for rope, none keeps more than sums in shared memory."""
    for name in ("norm", "add_norm", "sandwich_norm"):
        registry.add(TritonKernel(f"triton.{name}", name, function("norms_jit", name), at_most("hidden", LONGEST)))
    bind, limits = function("rope_jit", "qkv_rope"), at_most("head_dim", 1024)
    registry.add(TritonKernel("triton.qkv_rope", "qkv_rope", bind, limits, rope_shared, OF_ROPE))
    kinds = frozenset({"silu", "gelu_tanh"})
    bind = function("elementwise_jit", "gated_activation")
    registry.add(TritonKernel("triton.gated_activation", "gated_activation", bind, features=kinds))
    registry.add(TritonKernel("triton.output_gate", "output_gate", function("elementwise_jit", "output_gate")))
    bind = function("elementwise_jit", "embed")
    registry.add(TritonKernel("triton.embed", "embed", bind, _dense_only, layout="dense"))
    bind, scaled = function("route_jit", "route"), frozenset({"expert_scale"})
    registry.add(TritonKernel("triton.route", "route", bind, at_most("experts", 4096), features=scaled))
    bind, shared = function("route_jit", "moe_combine"), frozenset({"shared"})
    registry.add(TritonKernel("triton.moe_combine", "moe_combine", bind, features=shared))


def register_rope_attention(registry: Registry) -> None:
    """Adds the rotation into pages with attention behind it; the op must be there."""
    registry.add(
        TritonKernel(
            "triton.rope_attention",
            "rope_attention",
            function("rope_store_jit", "rope_attention"),
            _stored_pages,
            rope_shared,
            OF_ROPE | frozenset({"window", "softcap"}),
            reason="keys and values are rotated into their pages by one launch; then attention's own kernel",
        )
    )
