"""Gated DeltaNet: causal convolution, gates, delta rule and gated norm, over states kept in the sequence's slot.

Formulas: Yang et al., "Gated Delta Networks" (2024), as Qwen3.5 uses them. All of the rule is computed in fp32, or
in float64 where inputs and states are in that: tests judge kernels in fp32 by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import pad, silu, softplus

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.norm import norm, widened
from offroad.ops.spec import OpSpec, Tolerance
from offroad.run.rows import ReplayView, RingView, Rows

TOLERANCE = {"float32": Tolerance(5e-5, 2e-5), "bfloat16": Tolerance(3e-2, 1.6e-2), "float16": Tolerance(4e-3, 3e-3)}
CHUNK = 64  # tokens whose mutual influence is solved for at once
_L2_EPS = 1e-6


@dataclass(frozen=True)
class DeltaWeights:
    """`conv` [channels, kernel] (the last column meets the newest token), `a_log` and `dt_bias` [value_heads], `norm`
    [value_dim]; all fp32."""

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor


def gated_delta(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    state: RingView | ReplayView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
) -> torch.Tensor:
    """The mixer between its projections; qkvz [tokens, channels + value_heads * value_dim] and ba [tokens, 2 *
    value_heads] -> [tokens, value_heads * value_dim].

    `conv` holds raw columns [channels] (before convolution and activation), `state` S [value_heads, key_dim, value_dim]
    in fp32: the row of position p is what token p left behind. Reads the rows before each row's start (zeros before
    position 0), writes those of its tokens that the rings have room for. Verify rows take the recurrent form and leave
    a state for every token, or a record for every token and, at times, the state before them where states are replayed
    (feature "replay"); chunks take the chunked form and leave their last state.
    """
    if int(rows.width.sum()) < len(qkvz):  # tokens of no row: a step of fixed size that is not full
        inner, picked = _without_gaps(rows, qkvz.device)
        out = torch.zeros((len(qkvz), spec.value_width), dtype=qkvz.dtype, device=qkvz.device)
        out[picked] = gated_delta(qkvz[picked], ba[picked], conv, state, inner, spec, weights, eps)
        return out
    raw, z = qkvz.split((spec.channels, spec.value_width), dim=-1)
    mixed = silu(convolve(raw, conv, rows, weights.conv)).to(qkvz.dtype)
    q, k, v = _heads(mixed, spec)
    b, a = widened(ba).chunk(2, dim=-1)
    decay = -weights.a_log.to(a.dtype).exp() * softplus(a + weights.dt_bias)
    out = torch.empty_like(v)
    cut = int(rows.width[: rows.verify].sum())
    if cut:
        out[:cut] = _verify(q[:cut], k[:cut], v[:cut], decay[:cut], b[:cut].sigmoid(), state, rows)
    for row in range(rows.verify, len(rows.slot)):
        slot, start, width, offset = (int(x[row]) for x in (rows.slot, rows.start, rows.width, rows.offset))
        span = slice(offset, offset + width)
        before = _states(state, rows.slot_t[row : row + 1].long(), rows.start_t[row : row + 1].long())[0]
        out[span], after = chunked(q[span], k[span], v[span], decay[span], b[span].sigmoid(), before)
        if isinstance(state, ReplayView):
            state.state[slot] = after.to(state.state.dtype)
        else:
            state.data[slot, (start + width - 1) % state.capacity] = after.to(state.data.dtype)
    normed = norm(out.to(qkvz.dtype), None, eps) * weights.norm
    gate = widened(z).view_as(normed)
    return (normed * (silu(gate) if spec.gate == "silu" else gate.sigmoid())).to(qkvz.dtype).flatten(1)


def _without_gaps(rows: Rows, device: torch.device) -> tuple[Rows, torch.Tensor]:
    """(the rows with their tokens side by side, where those stand)."""
    offset = (rows.width.cumsum() - rows.width).astype(np.int32)
    picked = np.arange(rows.width.sum()) + np.repeat(rows.offset - offset, rows.width)
    inner = replace(rows, offset=offset, offset_t=torch.from_numpy(offset).to(device))
    return inner, torch.from_numpy(picked).to(device)


def convolve(raw: torch.Tensor, ring: RingView, rows: Rows, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of each row's raw columns [tokens, channels] behind those in the ring, widened;
    stores the newest columns of each row."""
    back, device = weight.shape[1] - 1, raw.device
    count = len(rows.slot)
    row_of = torch.repeat_interleave(torch.arange(count, device=device), rows.width_t.long(), output_size=len(raw))
    at = torch.arange(len(raw), device=device) - rows.offset_t.long()[row_of]
    older = rows.start_t.long()[:, None] - torch.arange(back, 0, -1, device=device)
    kept = ring.data[rows.slot_t.long()[:, None], older % ring.capacity]
    kept = torch.where((older >= 0)[..., None], kept, torch.zeros_like(kept))
    columns = torch.cat((kept.flatten(0, 1).to(raw.dtype), raw))
    out = torch.zeros(raw.shape, dtype=torch.promote_types(raw.dtype, weight.dtype), device=device)
    for tap in range(back + 1):
        behind = at - (back - tap)
        index = torch.where(
            behind >= 0,
            count * back + rows.offset_t.long()[row_of] + behind,
            row_of * back + back + behind,
        )
        out += widened(columns[index]) * weight[:, tap]
    newest = at >= rows.width_t.long()[row_of] - ring.capacity
    where = (rows.start_t.long()[row_of] + at)[newest] % ring.capacity
    ring.data[rows.slot_t.long()[row_of[newest]], where] = raw[newest].to(ring.data.dtype)
    return out


def _heads(mixed: torch.Tensor, spec: GatedDeltaSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k of unit length (q also divided by sqrt(key_dim)) [tokens, value_heads, key_dim], v [tokens, value_heads,
    value_dim]; widened."""
    width = spec.key_heads * spec.key_dim
    q, k, v = widened(mixed).split((width, width, spec.value_width), dim=-1)
    repeat = spec.value_heads // spec.key_heads

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, spec.key_heads, spec.key_dim)
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)).repeat_interleave(repeat, dim=1)

    return unit(q) * spec.key_dim**-0.5, unit(k), v.view(-1, spec.value_heads, spec.value_dim)


def _verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    ring: RingView | ReplayView,
    rows: Rows,
) -> torch.Tensor:
    """The recurrent form for the verify rows, token by token for all rows at once; stores a state or a record a
    token."""
    count, out = rows.verify, torch.empty_like(v)
    slots = rows.slot_t[:count].long()
    start, offset = rows.start_t[:count].long(), rows.offset_t[:count].long()
    state = _states(ring, slots, start)
    if isinstance(ring, ReplayView):
        fold = ring.folds(slots, start)
        ring.state[slots[fold]] = state[fold].to(ring.state.dtype)
    for t in range(int(rows.width[:count].max())):
        live = torch.from_numpy((rows.width[:count] > t).nonzero()[0]).to(q.device)
        at = offset[live] + t
        out[at], after, delta = recurrent(q[at], k[at], v[at], decay[at], beta[at], state[live])
        state[live] = after
        where = slots[live], (start[live] + t) % ring.capacity
        if isinstance(ring, ReplayView):
            shared = k.shape[1] // ring.key.shape[2]  # value heads that have one key head
            ring.key[where], ring.delta[where], ring.decay[where] = k[at, ::shared], delta, decay[at]
        else:
            ring.data[where] = after.to(ring.data.dtype)
    return out


def _states(ring: RingView | ReplayView, slots: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The states before each row's first token, widened [rows, heads, key_dim, value_dim]."""
    if isinstance(ring, ReplayView):
        return ring.at(slots, start)
    state = widened(ring.data[slots, (start - 1) % ring.capacity])
    return torch.where((start > 0)[:, None, None, None], state, torch.zeros_like(state))


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token for each of n sequences: q, k [n, heads, key_dim], v [n, heads, value_dim], decay and beta [n, heads],
    state [n, heads, key_dim, value_dim] -> (out [n, heads, value_dim], the new state, delta [n, heads, value_dim])."""
    state = state * decay.exp()[..., None, None]
    delta = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return torch.einsum("nhkv,nhk->nhv", state, q), state, delta


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for consecutive tokens of one sequence: q, k [tokens, heads, key_dim], .., state [heads, key_dim,
    value_dim] -> (out [tokens, heads, value_dim], the state behind the last token).

    In a chunk with G the running sum of decays and D_ij = e^(G_i - G_j) for i >= j, the updates delta solve
    (I + strictly lower(beta K K^T D)) delta = beta (V - e^G K S); padding has k, v, beta and decay of 0.
    """
    tokens = q.shape[0]
    missing = -tokens % CHUNK
    q, k, v, beta, decay = (
        pad(x.transpose(0, 1), (0, 0, 0, missing) if x.ndim == 3 else (0, missing)).unflatten(1, (-1, CHUNK))
        for x in (q, k, v, beta, decay)
    )
    total = decay.cumsum(-1)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.mT) * between  # its diagonal is not read
    sides = torch.cat((v * beta[..., None], weighted * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside = (q @ k.mT) * between
    outside = q * total.exp()[..., None]
    left = k * (total[..., -1:] - total).exp()[..., None]
    out = torch.empty_like(v)
    for c in range(q.shape[1]):
        delta = values[:, c] - keys[:, c] @ state
        out[:, c] = outside[:, c] @ state + inside[:, c] @ delta
        state = state * total[:, c, -1].exp()[:, None, None] + left[:, c].mT @ delta
    return out.flatten(1, 2)[:, :tokens].transpose(0, 1), state


OPS = (OpSpec("gated_delta", gated_delta.__doc__ or "", gated_delta, TOLERANCE),)
