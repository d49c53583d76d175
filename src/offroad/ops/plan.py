"""The plan: a kernel for every (layer, op, phase), row layouts and a byte budget, before a weight is read.

A pure function of the model's spec, the checkpoint's headers, a device profile and the settings: so it can be made, and
tested, for a device that is not here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any

from offroad.device.profile import DeviceProfile
from offroad.errors import PlanError
from offroad.models.shard import check_groups, shard
from offroad.models.spec import ModelSpec, Store
from offroad.ops import budget as bytes_of
from offroad.ops.budget import Dtypes, Memory
from offroad.ops.capture import GraphPlan, fitted, in_turns, plan_graphs
from offroad.ops.cells import DRAFTER, MODEL, Cell, Choice, Resolver, block_groups, groups
from offroad.ops.invariant import invariant_notes
from offroad.ops.roofline import CONTEXT, Roofline, costs, roofline
from offroad.ops.spec import Load, Registry
from offroad.ops.states import kept_states
from offroad.settings import Settings
from offroad.speculate.config import Speculation, chosen, drafting, speculation
from offroad.weights.source import Headers

SCALED = "float8_e4m3fn"  # the KV dtype that scales of checkpoints are made for


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before weights. `depth`: steps in flight; `k`: most drafts in a step; `store`: how
    recurrent states are kept, so that drafts can be taken back; `lag`: how many records may be behind one."""

    model: str
    family: str
    device: DeviceProfile
    dtype: str
    kv_dtype: str
    block: int
    k: int
    store: Store
    lag: int
    chunk: int
    depth: int
    max_len: int
    max_num_seqs: int
    keep: int
    kv_bytes_per_token: int
    window_bytes: int
    state_bytes: int
    ranks: int
    bound: Roofline | None
    cells: dict[Cell, Choice]
    memory: Memory
    drafter: Speculation | None
    notes: tuple[str, ...]
    fingerprint: str
    graphs: GraphPlan = GraphPlan()
    batch_invariant: bool = False

    def layout(self, layer: int, use: str) -> str:
        """The packed layout of the weight that the cells `use` of `layer` (or MODEL) read, e.g. "linear:qkv"."""
        return self.cells[Cell(layer, use, "decode")].layout

    def kernels(self) -> list[str]:
        return sorted({choice.kernel for choice in self.cells.values()})

    def summary(self) -> str:
        """One line per op: kernel and how many cells it has."""
        counts: dict[tuple[str, str], int] = {}
        for cell, choice in self.cells.items():
            key = (f"{choice.problem.op}.{cell.phase}", choice.kernel)
            counts[key] = counts.get(key, 0) + 1
        return "\n".join(f"{op:<26}{kernel} (x{count})" for (op, kernel), count in sorted(counts.items()))

    def explain(self) -> str:
        """The plan for a person: budget, notes, then each op with its kernel and every refusal's reason."""
        m, mib = self.memory, 1024**2
        held = (m.history_blocks - 1) * self.block
        each = f", of each of {self.ranks} ranks" if self.ranks > 1 else ""
        lines = [
            f"model           {self.model} ({self.family}), context {self.max_len}, {self.max_num_seqs} sequences",
            f"device          {self.device.name} ({self.device.source}), {m.total / 1024**3:.1f} GiB{each}",
            f"dtype           {self.dtype}, kv cache {self.kv_dtype}, block {self.block}, chunk {self.chunk}, "
            f"depth {self.depth}",
            *([_drafts(self.drafter)] if self.drafter else []),
            *([f"graphs          {self.graphs.describe()}"] if self.device.kind == "cuda" else []),
            f"kv cache        {self.kv_bytes_per_token:,} B a token growing, {self.window_bytes:,} B of windows and "
            f"{self.state_bytes:,} B of state a sequence",
            f"memory          weights {m.weights / mib:.0f} MiB | "
            f"history {m.history_block_bytes / 1024:.0f} KiB x {m.history_blocks} blocks | "
            f"window {m.window_block_bytes / 1024:.0f} KiB x {m.window_blocks} blocks | "
            f"slots {m.slots} x {m.slot_bytes / 1024:.0f} KiB | "
            f"checkpoints {m.checkpoints} x {m.checkpoint_bytes / 1024:.0f} KiB | "
            f"tables {m.tables / mib:.0f} MiB | workspace {m.workspace / mib:.0f} MiB | "
            f"headroom {m.headroom / mib:.0f} MiB",
            f"workspace       {m.workspaces.describe()}",
            f"room            {held:,} tokens of history: {held / self.max_len:.1f} sequences of the whole context",
            f"bound           {_bound(self.bound, self.max_num_seqs)}",
            *(f"note            {note}" for note in self.notes),
        ]
        lines += explain_cells(self.cells)
        return "\n".join([*lines, f"fingerprint     {self.fingerprint}"])

    def to_json(self) -> dict[str, Any]:
        """The plan for a program; cells are grouped as in `explain`."""
        head = {
            name: getattr(self, name)
            for name in (
                "model",
                "family",
                "dtype",
                "kv_dtype",
                "block",
                "k",
                "store",
                "lag",
                "chunk",
                "depth",
                "max_len",
                "max_num_seqs",
                "keep",
                "kv_bytes_per_token",
                "window_bytes",
                "ranks",
                "state_bytes",
                "batch_invariant",
                "notes",
                "fingerprint",
            )
        }
        memory = asdict(self.memory) | {
            "kv": self.memory.kv,
            "states": self.memory.states,
            "used": self.memory.used,
            "headroom": self.memory.headroom,
        }
        bound = None if self.bound is None else asdict(self.bound)
        return head | {
            "device": self.device.name,
            "memory": memory,
            "bound_tokens_per_second": bound,
            "graphs": asdict(self.graphs),
            "cells": cells_json(self.cells),
        }


def _drafts(drafter: Speculation) -> str:
    pay = ", as many as pay" if drafter.auto else ""
    rate = "" if drafter.acceptance is None else f", accepted at a rate of {drafter.acceptance}: answers mean nothing"
    return f"drafts          {drafter.method}, up to {drafter.tokens} a step{pay}{rate}"


def _bound(bound: Roofline | None, sequences: int) -> str:
    if bound is None:
        return "unknown: the device's rates are not in its profile"
    return (
        f"at best {bound.decode:,.0f} tokens/s for one sequence at {CONTEXT:,} tokens of context, "
        f"{bound.decode_all:,.0f} for {sequences}; prompts {bound.prefill:,.0f} (bytes and operations over the "
        "profile's rates)"
    )


def _grouped(cells: dict[Cell, Choice]) -> list[tuple[str, str, list[int], Choice]]:
    """(op, phase, layers, choice) for cells that were resolved alike."""

    def order(entry: tuple[Cell, Choice]) -> tuple:
        cell, choice = entry
        return cell.op, cell.phase, choice.kernel, repr(sorted(choice.problem.sizes)), repr(choice)

    rows = []
    for _, run in groupby(sorted(cells.items(), key=order), key=order):
        entries = list(run)
        cell, choice = entries[0]
        rows.append((cell.op, cell.phase, sorted(c.layer for c, _ in entries), choice))
    return sorted(rows, key=lambda row: (row[2][0], row[0], row[1]))


def layer_ranges(layers: list[int]) -> str:
    """`0-2,4` for [0, 1, 2, 4], `3,7,..63` for every fourth; `model`, `drafter` for what stands outside layers."""
    if layers[0] in (MODEL, DRAFTER):
        return "drafter" if layers == [DRAFTER] else "model" if layers == [MODEL] else "model, drafter"
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    steps = {(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(parts)}
    if len(parts) > 4 and len(steps) == 1:
        return f"{texts[0]},{texts[1]},..{texts[-1]}"
    return ",".join(texts)


def explain_cells(cells: dict[Cell, Choice]) -> list[str]:
    lines = []
    for op, phase, layers, choice in _grouped(cells):
        kernel = choice.kernel or "NO KERNEL"
        layout = f" [{choice.layout}]" if choice.layout else ""
        lines.append(f"{layer_ranges(layers):<15} {op + '.' + phase:<26} {kernel}{layout}: {choice.reason}")
        lines += [f"{'':<18}refused {refusal.kernel}: {refusal.reason}" for refusal in choice.refused]
    return lines


def cells_json(cells: dict[Cell, Choice]) -> list[dict[str, Any]]:
    return [
        {
            "layers": layer_ranges(layers),
            "op": op,
            "phase": phase,
            "kernel": choice.kernel or None,
            "reason": choice.reason,
            "layout": choice.layout,
            "sizes": dict(choice.problem.sizes),
            "features": sorted(choice.problem.features),
            "refused": {refusal.kernel: refusal.reason for refusal in choice.refused},
        }
        for op, phase, layers, choice in _grouped(cells)
    ]


def choose_dtypes(config_dtype: str | None, device: DeviceProfile, settings: Settings) -> tuple[str, str, list[str]]:
    """(activation dtype, KV dtype, notes): `auto` is the checkpoint's dtype where the device computes in it."""
    notes = []
    dtype = settings.dtype
    if dtype == "auto":
        if device.kind == "cpu":
            dtype = "float32"
        elif config_dtype in ("bfloat16", None, "float32"):
            dtype = "bfloat16" if device.has("mma_bf16") else "float16"
            if dtype == "float16":
                notes.append(
                    f"dtype float16 for a {config_dtype or 'bfloat16'} checkpoint: {device.name} has no mma_bf16"
                )
        else:
            dtype = config_dtype
    elif dtype == "bfloat16" and device.kind == "cuda" and not device.has("mma_bf16"):
        raise PlanError("--dtype", found=dtype, accepted="float16, float32", next=f"{device.name} has no mma_bf16")
    kv, kv_notes = _kv_dtype(settings.kv_cache_dtype, dtype, device)
    return dtype, kv, notes + kv_notes


def _kv_dtype(asked: str, dtype: str, device: DeviceProfile) -> tuple[str, list[str]]:
    """The KV cache's dtype (torch's name) and notes; "fp8" is e4m3 where the device converts it, else e5m2."""
    if asked == "auto":
        return dtype, []
    if not asked.startswith("fp8"):
        return asked, []
    converts = device.kind == "cpu" or device.has("cvt_e4m3")
    if asked == "fp8_e4m3" and not converts:
        raise PlanError(
            "--kv-cache-dtype",
            found=f"fp8_e4m3 on {device.name}, which cannot convert e4m3 numbers",
            accepted="fp8_e5m2, which fp16 units read by a shift, or auto",
            next="--kv-cache-dtype fp8 takes what the device has",
        )
    kind = "e4m3fn" if asked == "fp8_e4m3" or (asked == "fp8" and converts) else "e5m2"
    notes = []
    if asked == "fp8":
        why = (
            ""
            if converts
            else f": {device.name} does not convert e4m3 numbers; rows are stored in 8 bits and widened when read"
        )
        notes.append(f"kv cache fp8 is {kind.removesuffix('fn')} here{why}")
    return f"float8_{kind}", notes


def _scale_notes(kv_dtype: str, scaled: int) -> list[str]:
    if kv_dtype == SCALED:
        return [f"kv scales: the checkpoint's, of {scaled} layers" if scaled else "kv scales: none there, 1 is taken"]
    return [f"kv scales of {scaled} layers are for e4m3, not used with {kv_dtype}"] if scaled else []


def _resolved(spec: ModelSpec, headers: Headers, resolver: Resolver, dtypes: Dtypes, block: int) -> dict[Cell, Choice]:
    """A kernel for every cell. Raises PlanError that lists those without one."""
    cells: dict[Cell, Choice] = {}
    for group in groups(spec, headers, dtypes.activation, dtypes.kv, block):
        cells |= resolver.resolve(group)
    for group in list(block_groups(spec, dtypes.activation, cells)):
        cells |= resolver.resolve(group)
    if open_cells := {cell: choice for cell, choice in cells.items() if not choice.kernel}:
        raise PlanError(
            f"no kernel for {len(open_cells)} cells on {resolver.device.name}",
            found="\n" + "\n".join(explain_cells(open_cells)),
            accepted="a kernel for every layer, op and phase",
            next="run without --batch-invariant, if that is what kernels are refused for"
            if resolver.invariant
            else "--allow-reference runs them slowly; or choose another dtype or device"
            if all(choice.refused for choice in open_cells.values())
            else f"offroad plans {spec.family} models and cannot run them yet: choose another model",
        )
    return cells


def _step_tokens(settings: Settings, length: int) -> int:
    """The most that a step has of sequences of up to `length` tokens."""
    return min(settings.max_num_batched_tokens, length * settings.max_num_seqs)


def plan(
    name: str,
    spec: ModelSpec,
    headers: Headers,
    device: DeviceProfile,
    settings: Settings,
    registry: Registry,
    config_dtype: str | None = None,
    kv_scaled: int = 0,
) -> Plan:
    """The plan, or PlanError that lists every unresolved cell with the reason of each candidate.

    `kv_scaled`: layers for which the checkpoint has scales of an 8-bit cache.
    """
    dtype, kv_dtype, notes = choose_dtypes(config_dtype, device, settings)
    notes += _scale_notes(kv_dtype, kv_scaled)
    ranks = settings.tensor_parallel_size
    drafter = chosen(speculation(settings.speculative_config), spec, headers)
    spec = shard(drafting(spec, headers, drafter), ranks)
    k, dtypes = drafter.tokens if drafter else 0, Dtypes(dtype, kv_dtype)
    check_groups(spec, headers, ranks)
    block, length = bytes_of.block_of(spec), settings.max_model_len or spec.max_len
    load = Load(settings.max_num_seqs, k + 1, _step_tokens(settings, length), length)
    resolver = Resolver(registry, device, settings, load)
    store, lag, store_notes = kept_states(spec, headers, resolver, settings, dtypes, block, k)
    spec = spec.storing(store, lag)
    notes += invariant_notes(settings, block, k)
    cells = _resolved(spec, headers, resolver, dtypes, block)
    packed = bytes_of.packed_bytes(spec, headers, cells, dtype)
    weights = sum(packed.values()) + bytes_of.tensor_bytes(spec)
    graphs = plan_graphs(spec, cells, registry, device, settings, k, dtype)
    graphs, divided = fitted(
        graphs, lambda taken: bytes_of.divide(spec, device, settings, weights, dtypes, block, k, taken, cells)
    )
    chunk = _step_tokens(settings, divided.max_len)
    values: dict[str, Any] = dict(
        model=name,
        family=spec.family,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block=block,
        k=k,
        store=store,
        lag=lag,
        chunk=chunk,
        depth=2 if device.kind == "cuda" and drafter is None else 1,  # what drafts do to lengths is known late
        max_len=divided.max_len,
        max_num_seqs=settings.max_num_seqs,
        **_of_a_sequence(spec, dtypes, k),
        ranks=ranks,
        bound=roofline(spec, packed, device, dtypes, settings.max_num_seqs),
        cells=cells,
        graphs=in_turns(graphs, costs(spec, packed, device, dtypes), len(spec.layers), settings.max_num_seqs, chunk),
        batch_invariant=settings.batch_invariant,
        memory=divided.memory,
        drafter=drafter,
        notes=(*notes, *device.notes, *spec.notes, *store_notes, *divided.notes),
    )
    return Plan(**values, fingerprint=_fingerprint(values, spec, headers))


def _of_a_sequence(spec: ModelSpec, dtypes: Dtypes, k: int) -> dict[str, int]:
    """Tokens that windows keep, and bytes of what a sequence has."""
    return dict(
        keep=bytes_of.window_keep(spec),
        kv_bytes_per_token=bytes_of.kv_bytes_per_token(spec, dtypes),
        window_bytes=bytes_of.window_bytes(spec, dtypes),
        state_bytes=bytes_of.state_bytes(spec, dtypes, k),
    )


def _fingerprint(values: dict[str, Any], spec: ModelSpec, headers: Headers) -> str:
    """Names what computes: model spec, how weights are stored, kernels by cell, dtypes, block, toolchain versions. Not
    sizes of pools, nor the name that the model is served by."""
    named = {name: values[name] for name in ("dtype", "kv_dtype", "block", "k")}
    if values["batch_invariant"]:
        named["batch_invariant"] = True
    named["ranks"] = values["ranks"]
    named["stored"] = sorted((header.name, header.kind, header.shape) for header in headers.values())
    named["toolchain"] = values["device"].toolchain
    named["cells"] = [
        (cell.layer, cell.op, cell.phase, choice.kernel, choice.layout)
        for cell, choice in sorted(values["cells"].items())
    ]
    text = json.dumps([named, repr(spec)], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()
