"""Launches FP8 products (W8A8): e4m3 weights with a scale for 128 by 128 of them, activations rounded to e4m3.

Steps of many tokens only: activations are rounded with a scale for each token and 128 of k, weights come out of their
records, and e4m3 is multiplied by e4m3: by cuBLASLt where it does (`linear.by_library`), by a Triton kernel elsewhere.
Fewer tokens gain nothing from it: weights are widened in registers, and activations stay as they are.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
from triton.errors import TritonError

from offroad.device.profile import DeviceProfile
from offroad.errors import PlanError
from offroad.ops.linear import round_activations
from offroad.ops.spec import Bound, Problem
from offroad.quant.packed import Packed, spread
from offroad.triton_kernels import linear_fp8_jit, linear_run
from offroad.triton_kernels.linear import DENSE_FROM, by_library, fp8_parts, widening
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, Records, pack
from offroad.triton_kernels.linear_run import INTERPRETED
from offroad.triton_kernels.memory import MEMORY

TOKENS = 32  # of a program that rounds activations of many tokens
# From which Triton (3.6) converts fp32 to e4m3 in one step. On 8.9 it truncates to fp16 first, so that numbers between
# two codes go to the wrong one.
NATIVE_FROM = (9, 0)
E4M3 = torch.float8_e4m3fn
_PROBE = (48, 256, 640)  # rows, n, k: more than one block each way, and 5 groups, which are padded to 8


def run(
    x: torch.Tensor,
    weight: Packed,
    *,
    few: Bound = linear_run.run,
    from_rows: int = DENSE_FROM,
    library: bool = True,
) -> torch.Tensor:
    """`x^ w^T + bias`; x [tokens, k] in 16 bits -> [tokens, n] in its type.

    From `from_rows` rows on, x^ is x as `round_activations` gives it, and a token with a value that is not finite gives
    NaN; with fewer it is x, and `few` multiplies. `library`: cuBLASLt multiplies, not Triton's kernel.
    """
    assert isinstance(weight, Records), weight.layout
    assert (weight.kind, weight.group, weight.perm) == ("e4m3", 128, None), weight.kind
    if x.shape[0] < from_rows:
        return few(x, weight)
    x = x.contiguous()
    q, q_scales, w, w_scales = operands(weight, x.shape[0], x.device)
    quantise(x, q, q_scales)
    unpack(weight, w, w_scales)
    multiply = scaled_product if library else tiled_product
    y = multiply(q, q_scales, w, w_scales, x.dtype)[: x.shape[0]]
    return y if weight.bias is None else y.add_(weight.bias)


def quantise(x: torch.Tensor, q: torch.Tensor, s: torch.Tensor) -> None:
    """x [tokens, k] into codes q uint8 [padded tokens, k] and scales s fp32 [k / 128, padded tokens]."""
    (rows, k), padded = x.shape, q.shape[0]
    grid = (-(-padded // TOKENS), k // BLOCK_K)
    linear_fp8_jit.quantise[grid](x, q, s, rows, padded, k, BT=TOKENS, NATIVE=_native())


@cache
def _native() -> bool:
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= NATIVE_FROM


def unpack(weight: Records, q: torch.Tensor, s: torch.Tensor) -> None:
    """A weight into codes q uint8 [n, k], by rows, and scales of blocks s fp32 [n / 128, padded k / 128]."""
    scales, units = weight.tensors["s"], weight.k // BLOCK_K
    grid = (weight.n // BLOCK_N, s.shape[1])
    linear_fp8_jit.unpack[grid](
        weight.tensors["q"],
        scales,
        q.view(torch.int32),
        s,
        weight.k,
        units,
        s.shape[1],
        scales.shape[1],
    )


def scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`x w^T` of codes uint8 x [tokens, k] and w [n, k] with scales fp32 [k / 128, tokens] and [n / 128, padded
    k / 128], padded to a multiple of 4; [tokens, n] in `dtype`. tokens is a multiple of 4.

    The layouts are cuBLASLt's (its manual, "Scaling factors layouts"): scales of rows lie side by side by row, those
    of blocks by k. Only CUDA devices of compute capability 9.0 do this.
    """
    if x.is_meta:
        return torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        x.view(E4M3),
        w.view(E4M3).t(),
        x_scales.t(),
        ScalingType.BlockWise1x128,
        w_scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


def tiled_product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As `scaled_product`, by a Triton kernel, on any device with products of e4m3."""
    (rows, k), n, tile = x.shape, w.shape[0], linear_fp8_jit.TILE
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    grid = (-(-rows // tile.tokens) * (n // tile.outputs),)
    linear_fp8_jit.product[grid](
        x,
        x_scales,
        w,
        w_scales,
        out,
        rows,
        n,
        k,
        w_scales.shape[1],
        BM=tile.tokens,
        BN=tile.outputs,
        WIDE=tile.wide,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def operands(weight: Records, rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Places in the memory that kernels share for codes and scales of `rows` tokens and of the weight."""
    sizes = fp8_parts(rows, weight.n, weight.k)
    whole = MEMORY.get(device, "e4m3 operands", sum(sizes), torch.uint8)
    x, xs, w, ws = whole[: sum(sizes)].split(sizes)
    padded, units = sizes[0] // weight.k, weight.k // BLOCK_K
    return (
        x.view(padded, weight.k),
        xs.view(torch.float32)[: units * padded].view(units, padded),
        w.view(weight.n, weight.k),
        ws.view(torch.float32)[: weight.n // 128 * (units + -units % 4)].view(weight.n // 128, -1),
    )


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """`run` for a plan's device, once a small product there is what it should be. Raises PlanError where it is not.

    In steps that only decode, weights are widened whatever the number of rows."""
    from offroad.ops.registry import default_registry

    few = default_registry().kernels[widening(device, problem)[0]].prepare(device, problem)
    if problem.phase != "prefill":
        return few
    library = by_library(device)
    if torch.cuda.is_available() and device.kind == "cuda":
        probe(torch.device("cuda", torch.cuda.current_device()), getattr(torch, problem.dtype), library)
    return partial(run, few=few, library=library)


@cache
def probe(device: torch.device, dtype: torch.dtype, library: bool = True) -> None:
    """Compares a product with the same in fp64, since nothing but a wrong result would tell that a library reads scales
    in another order. Raises PlanError."""
    rows, n, k = _PROBE
    random = torch.Generator().manual_seed(0)
    codes = torch.randn(n, k, generator=random).to(E4M3)
    scales = torch.rand(n // 128, k // 128, generator=random) * 0.05 + 0.001
    weight = Packed("fp8", n, k, {"q": codes, "s": scales.repeat_interleave(128, dim=0)}, 128)
    mine = pack(weight)
    mine = Records(mine.layout, n, k, {name: t.to(device) for name, t in mine.tensors.items()}, 128, kind=mine.kind)
    x = torch.randn(rows, k, generator=random) * torch.rand(rows, k // 128, generator=random).repeat_interleave(128, 1)
    x = x.to(dtype)
    wanted = round_activations(x.double()) @ (codes.double() * spread(weight.tensors["s"], 128, k).double()).T
    try:
        found = run(x.to(device), mine, from_rows=1, library=library).cpu().double()
    except (RuntimeError, ValueError, TypeError, TritonError) as error:  # as torch of a library or layout that it lacks
        raise _refusal(str(error), library) from error
    apart = float((found - wanted).abs().max() / wanted.abs().max())
    if not apart < 0.01:
        raise _refusal(f"a product of {rows} x {k} by {n} that is {apart:.3g} of its largest value away", library)


def _refusal(found: str, library: bool) -> PlanError:
    whose = f"torch {torch.__version__} (CUDA {torch.version.cuda})" if library else f"Triton {triton.__version__}"
    return PlanError(
        f"triton.linear_w8a8: products of e4m3 operands by {whose}",
        found=found,
        accepted="the product that plain arithmetic gives, within 1 %",
        next="leave out --kernel linear@fp8=triton.linear_w8a8: weights are widened instead",
    )
