"""Every kernel in the specialisations that the plans use, with what one launch of it moves and computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offroad.nvrtc import attention, delta, linear, rows, workspace
from offroad.nvrtc.compile import Source

CONTEXT = 16_384  # tokens behind a decode row
CHUNK = 512  # tokens of a prefill chunk, over as many older ones as CONTEXT


@dataclass(frozen=True)
class Variant:
    """A kernel of a source. `launch` says what the figures are for: bytes from and to memory, and operations (two a
    multiply-add). `tensor`: its SASS must have tensor-core instructions; `shares`: it uses the source's shared
    memory."""

    source: Source
    kernel: str
    launch: str
    bytes: int
    operations: int
    tensor: bool = False
    shares: bool = True

    @property
    def shared(self) -> int:
        return self.source.shared if self.shares else 0

    @property
    def label(self) -> str:
        return f"{self.kernel} ({self.source.label})"


def variants() -> Iterator[Variant]:
    yield from _attention()
    yield from _linear()
    yield from _delta()
    yield from _rows()


def sources() -> list[Source]:
    """Each source once."""
    return list(dict.fromkeys(variant.source for variant in variants()))


def _attention() -> Iterator[Variant]:
    """Decode with one tile of rows, verify with four, chunks; KV heads and groups as usual for that head size."""
    for dim, kv_heads, group in ((32, 4, 1), (64, 8, 4), (128, 8, 4), (256, 4, 6), (512, 4, 8)):
        for e5m2 in (False, True):
            row = 2 * kv_heads * dim * (1 if e5m2 else 2)
            kind = "e5m2" if e5m2 else "fp16"
            for tiles, tokens in ((1, 1), (4, 4)):
                yield Variant(
                    attention.source(dim, tiles, e5m2),
                    "attention",
                    f"{tokens} tokens, {CONTEXT} keys, {kv_heads} x {group} heads, {kind}",
                    CONTEXT * row + 4 * tokens * kv_heads * group * dim,
                    4 * tokens * CONTEXT * kv_heads * group * dim,
                    True,
                )
            yield Variant(
                attention.source(dim, attention.chunk_tiles(dim), e5m2),
                "attention",
                f"{CHUNK} tokens, {CONTEXT} keys, {kv_heads} x {group} heads, {kind}",
                CONTEXT * row + 4 * CHUNK * kv_heads * group * dim,
                4 * CHUNK * CONTEXT * kv_heads * group * dim,
                True,
            )


# Kind, bits of a weight, group, bytes of a group's scale (and zero).
_KINDS = (("q4", 4, 128, 4), ("f8", 8, 128, 2), ("f4", 4, 16, 2), ("f4", 4, 32, 2), ("q8", 8, 128, 4))


def _linear() -> Iterator[Variant]:
    n, k = 34_816, 5_120
    for kind, bits, group, scale in _KINDS:
        weights = n * k * bits // 8 + n * k // group * scale
        scales = linear.CHUNK[kind] // 16 if group == 16 else 1
        for tiles, tokens in ((1, 1), (2, 16), (4, 32), (8, CHUNK)):
            yield Variant(
                linear.source(kind, tiles, scales),
                "linear",
                f"{tokens} tokens, {n} x {k}, group {group}",
                weights + 2 * tokens * (n + k),
                2 * tokens * n * k,
                True,
            )
        columns = workspace.slab(n, k)
        yield Variant(
            workspace.source(kind, scales),
            "dequantise",
            f"{columns} x {k}, group {group}",
            weights * columns // n + 2 * columns * k,
            2 * columns * k,
        )


def _delta() -> Iterator[Variant]:
    """Qwen3.5's heads, and small ones that models for tests have."""
    for heads, dim, channels in ((48, 128, 10_240), (8, 16, 256)):
        made = delta.source(dim, dim, 4)
        taps = channels * (2 * 5 + 16)
        yield Variant(made, "convolve", f"1 token, {channels} channels", taps, 8 * channels, shares=False)
        state = heads * dim * dim
        yield Variant(made, "rule", f"1 token, {heads} heads", 2 * 4 * state, 7 * state)
        chunk, part, width = delta.chunk_source(dim, dim), delta.PART, heads * dim
        blocks = heads * -(-dim // delta.slice_of(dim))
        # A part and block: two products of keys, and for each of its columns three with the state, two with a matrix.
        each = 2 * part * (2 * part * dim + delta.slice_of(dim) * (3 * dim + 2 * part))
        moved = CHUNK * (channels * 2 + width * 2) + 2 * 4 * state
        yield Variant(chunk, "chunk", f"{CHUNK} tokens, {heads} heads", moved, CHUNK // part * blocks * each, True)
        yield Variant(
            chunk, "gated_norm", f"{CHUNK} tokens, {heads} heads", CHUNK * width * 6, CHUNK * width * 8, shares=False
        )


def _rows() -> Iterator[Variant]:
    hidden, size = 5_120, 17_408
    yield Variant(rows.NORM, "rms_norm", f"{CHUNK} tokens, hidden {hidden}", CHUNK * hidden * 8, CHUNK * hidden * 5)
    yield Variant(rows.GATE, "gated_activation", f"{CHUNK} tokens, {size}", CHUNK * size * 6, CHUNK * size * 5)
    yield Variant(rows.GATE, "output_gate", f"{CHUNK} tokens, 24 x 256", CHUNK * 6_144 * 6, CHUNK * 6_144 * 4)
    width = (2 * 24 + 8) * 256
    yield Variant(rows.ROPE, "qkv_rope", f"{CHUNK} tokens, 24 + 8 heads of 256", CHUNK * width * 4, CHUNK * width * 6)
