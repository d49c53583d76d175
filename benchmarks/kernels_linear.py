"""Times the Triton linears on one GPU, at real models' shapes: python benchmarks/kernels_linear.py [--tune | --w8a8]

Prints microseconds, GB/s of weight bytes, their share of --bandwidth, and TFLOP/s, beside torch's linear in bf16.
Weights rotate over more memory than the L2 cache has, and the launches of one reading are replayed as a CUDA graph.
With --w8a8, only that: each piece of a product of e4m3 operands at --rows, beside what widens weights (8.9 and later).
With --tune, tries tiles for each shape and number of rows below 512, and prints the best ones beside the one used.
With --gated, times gate_up and its activation instead: each alone, one after the other, and in one kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from offroad.device.probe import probe_cuda
from offroad.quant.packed import Packed
from offroad.triton_kernels import linear_fp8, linear_run
from offroad.triton_kernels.elementwise_jit import gated_activation
from offroad.triton_kernels.linear import by_library, too_old
from offroad.triton_kernels.linear_gated import fused, takes
from offroad.triton_kernels.linear_grouped import grouped
from offroad.triton_kernels.linear_pack import pack
from offroad.triton_kernels.linear_run import Tile, card, run

SHAPES = {  # [n, k]
    "qwen3.5-27b": {
        "qkvz": (16384, 5120),
        "qkv": (14336, 5120),
        "out": (5120, 6144),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
    },
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "gemma-4-31b": {
        "qkv": (16384, 5376),
        "o": (5376, 8192),
        "qkv_full": (18432, 5376),
        "o_full": (5376, 16384),
        "gate_up": (43008, 5376),
        "down": (5376, 21504),
    },
}
EXPERTS = {"gate_up": (1024, 2048), "down": (2048, 512)}  # Qwen3.5-35B-A3B: 256 experts, 8 of them a token
COUNT, TOP_K = 256, 8
FORMATS = {
    "w4g128": ("affine4", 128),
    "w4g32": ("affine4", 32),
    "fp8": ("fp8", 128),
    "nvfp4": ("fp4", 16),
    "int8": ("affine8", 0),
}
ROTATED = 256 << 20  # bytes of weights between two readings of one of them


def random_weight(kind: str, n: int, k: int) -> Packed:
    """A packed weight of random codes."""
    layout, group = FORMATS[kind]
    group = group or k
    s = torch.rand(n, -(-k // group), device="cuda").mul_(0.01).add_(0.001).bfloat16().float()
    if layout in ("affine4", "fp4"):
        q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        if layout == "fp4":
            s = (s * 1000).to(torch.float8_e4m3fn).float() * 0.01
        return pack(Packed(layout, n, k, {"q": q, "s": s} | ({"m": -8 * s} if layout == "affine4" else {}), group))
    if layout == "fp8":  # as checkpoints have them: bits decide what power products take
        q = torch.randn(n, k, device="cuda").mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    else:
        q = torch.randint(-100, 100, (n, k), dtype=torch.int8, device="cuda")
    return pack(Packed(layout, n, k, {"q": q, "s": s}, group))


def copies(size: int) -> int:
    return max(2, -(-ROTATED // size))


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one of `calls`, captured one after the other in a graph."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    readings = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        readings.append(start.elapsed_time(end) * 1000 / len(calls) / rounds)
    return statistics.median(readings[1:])


def tiles(n: int, k: int, rows: int, quick: bool) -> Iterator[Tile]:
    """Tiles worth a try; a few of them, if it has to be `quick`: some programs to a tile, or equal shares of all."""
    m, sms = linear_run.width(rows, torch.bfloat16), card(torch.device("cuda", 0)).sms
    units, blocks = -(-k // linear_run.BLOCK_K), -(-rows // m)
    shapes = [(64, 4, None), (64, 4, {16: 80, 32: 96, 64: 128}[m]), (128, 8, 128)]
    shapes += [] if quick else [(128, 4, None), (256, 8, None)]
    for (outputs, warps, registers), stages in product(shapes, (3, 4) if quick else (2, 3, 4, 5)):
        of_all = -(-n // outputs) * blocks
        for split in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
            if -(-units // split) * split <= 1.15 * units and sms * 0.7 <= of_all * split <= sms * 8:
                yield Tile(outputs, m, split, warps, stages, registers)
        for per_sm in (1, 2, 3, 4, 5):
            yield Tile(outputs, m, 1, warps, stages, registers, programs=max(1, per_sm * sms // blocks))


def line(name: str, rows: int, us: float, size: int, flops: float, bandwidth: float, torch_us: float | None) -> str:
    share = size / us / bandwidth * 1e-6
    beside = "" if torch_us is None else f" | torch bf16 {torch_us:8.1f} us, {torch_us / us:5.2f} times as long"
    rates = f"{size / us * 1e-3:7.0f} GB/s {share:6.1%} {flops / us * 1e-6:7.1f} TF/s"
    return f"{name:<28} rows {rows:>4} {us:9.1f} us {rates}{beside}"


def linears(options: argparse.Namespace) -> None:
    for model, shapes in SHAPES.items():
        for name, (n, k) in shapes.items():
            if options.only not in f"{model} {name}":
                continue
            dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies(n * k * 2))]
            xs = {rows: torch.randn(rows, k, device="cuda").bfloat16() for rows in options.rows}
            beside = {
                rows: microseconds([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense])
                for rows, x in xs.items()
            }
            del dense
            for kind in options.formats:
                first = random_weight(kind, n, k)
                weights = [first] + [random_weight(kind, n, k) for _ in range(copies(first.nbytes) - 1)]
                for rows, x in xs.items():
                    us = microseconds([lambda w=w, x=x: run(x, w) for w in weights])
                    head = f"{model} {name} {kind}"
                    flops = 2.0 * rows * n * k
                    print(line(head, rows, us, first.nbytes, flops, options.bandwidth, beside[rows]), flush=True)
                    if options.tune and rows < linear_run.DENSE_FROM:
                        tune(x, weights, kind, n, k, us, options.quick)


def tune(x: torch.Tensor, weights: list[Packed], kind: str, n: int, k: int, us: float, quick: bool) -> None:
    found = []
    rows = x.shape[0]
    for at in tiles(n, k, rows, quick):
        try:
            found.append((microseconds([lambda w=w, at=at: run(x, w, choice=at) for w in weights]), at))
        except Exception as error:  # noqa: BLE001 a tile that does not fit is not a candidate
            print(f"    {at}: {type(error).__name__}")
    blocks = -(-rows // 64)
    used = linear_run.tile(linear_run.stored(weights[0]).kind, n, k, rows, blocks, card(x.device), x.dtype)
    print(f"    used {used} {us:.1f} us; best:")
    for time, at in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"    {time:8.1f} us {at}", flush=True)


def experts(options: argparse.Namespace) -> None:
    for name, (n, k) in EXPERTS.items():
        for kind in options.formats:
            if options.only not in f"experts {name}":
                continue
            weight = random_weight(kind, COUNT * n, k)
            for tokens in options.rows:
                x = torch.randn(tokens, k, device="cuda").bfloat16()
                picks = [torch.rand(tokens, COUNT, device="cuda").topk(TOP_K, dim=-1).indices for _ in range(8)]
                us = microseconds([lambda p=p, x=x, w=weight: grouped(x, p, w, COUNT) for p in picks])
                read = statistics.mean(len(p.unique()) for p in picks) / COUNT * weight.nbytes
                flops = 2.0 * tokens * TOP_K * n * k
                print(line(f"experts {name} {kind}", tokens, us, int(read), flops, options.bandwidth, None), flush=True)


def gated(options: argparse.Namespace) -> None:
    """One kernel for gate_up and its activation against two, with the tile that is used and with others."""
    for model, shapes in SHAPES.items():
        n, k = shapes["gate_up"]
        if options.only not in f"{model} gate_up":
            continue
        for kind in options.formats:
            first = random_weight(kind, n, k)
            weights = [first] + [random_weight(kind, n, k) for _ in range(copies(first.nbytes) - 1)]
            for rows in options.rows:
                x = torch.randn(rows, k, device="cuda").bfloat16()
                if not takes(rows, x.dtype, first):
                    print(f"{model} gate_up {kind:<8} rows {rows:>4}: by two kernels")
                    continue
                times = [
                    microseconds([lambda w=w, x=x: run(x, w) for w in weights]),
                    microseconds([lambda y=run(x, w): gated_activation(y, "silu") for w in weights]),
                    microseconds([lambda w=w, x=x: gated_activation(run(x, w), "silu") for w in weights]),
                    microseconds([lambda w=w, x=x: fused(x, w, "silu") for w in weights]),
                ]
                names = ("linear", "activation", "one after the other", "in one kernel")
                text = ", ".join(f"{name} {us:.1f}" for name, us in zip(names, times, strict=True))
                print(f"{model} gate_up {kind:<8} rows {rows:>4}: us {text}")
                tune_gated(x, weights, kind, times[-1])


def tune_gated(x: torch.Tensor, weights: list[Packed], kind: str, us: float) -> None:
    n, k = weights[0].n, weights[0].k
    used = linear_run.tile(linear_run.stored(weights[0]).kind, n, k, x.shape[0], 1, card(x.device), x.dtype)
    print(f"    {us:8.1f} us {used} is used")
    for at in tiles(n, k, x.shape[0], quick=True):
        if at == used:
            continue
        try:
            time = microseconds([lambda w=w, at=at: fused(x, w, "silu", choice=at) for w in weights])
        except Exception as error:  # noqa: BLE001 a tile that does not fit is not a candidate
            print(f"    {at}: {type(error).__name__}")
            continue
        print(f"    {time:8.1f} us {at}", flush=True)


def w8a8(options: argparse.Namespace) -> None:
    """Rounding activations, weights out of records, the product, all of them; and weights widened to bf16."""
    products = {"Triton": linear_fp8.tiled_product}
    library = by_library(probe_cuda()) and not too_old(probe_cuda())
    products |= {"cuBLASLt": linear_fp8.scaled_product} if library else {}
    for model, shapes in SHAPES.items():
        for name, (n, k) in shapes.items():
            if options.only not in f"{model} {name}":
                continue
            weight = random_weight("fp8", n, k)
            for rows in options.rows:
                x = torch.randn(rows, k, device="cuda").bfloat16()
                on = card(x.device)
                q, qs, w, ws = linear_fp8.operands(weight, rows, x.device)
                linear_fp8.quantise(x, q, qs)
                linear_fp8.unpack(weight, w, ws)
                pieces = {
                    "quantise": (lambda: linear_fp8.quantise(x, q, qs), 3 * x.numel(), 0.0),  # noqa: B023
                    "unpack": (lambda: linear_fp8.unpack(weight, w, ws), 2 * n * k, 0.0),  # noqa: B023
                    "w8a16 through bf16": (lambda: linear_run.through_dense(x, weight, on), n * k, 1.0),  # noqa: B023
                }
                for whose, multiply in products.items():
                    call = partial(multiply, q, qs, w, ws, x.dtype)
                    whole = partial(linear_fp8.run, x, weight, from_rows=1, library=whose == "cuBLASLt")
                    pieces |= {f"product, {whose}": (call, n * k, 1.0), f"w8a8 by {whose}": (whole, n * k, 1.0)}
                if rows <= 1024:
                    registers = lambda: linear_run.run(x, weight, dense_from=rows + 1)  # noqa: B023, E731
                    pieces["w8a16 in registers"] = (registers, n * k, 1.0)
                for piece, (call, size, share) in pieces.items():
                    us = microseconds([call])
                    flops = share * 2.0 * rows * n * k
                    print(line(f"{name} {piece}", rows, us, size, flops, options.bandwidth, None), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try tiles")
    parser.add_argument("--w8a8", action="store_true", help="pieces of products of e4m3 operands, e.g. --rows 8192")
    parser.add_argument("--quick", action="store_true", help="with --tune: few tiles")
    parser.add_argument("--gated", action="store_true", help="gate_up and its activation, in one kernel and in two")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 2048])
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=tuple(FORMATS))
    parser.add_argument("--only", default="", help="a part of a model's and a linear's name, as 'qwen3.5-27b gate_up'")
    parser.add_argument("--bandwidth", type=float, default=3.0, help="TB/s that count as all of it")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    if options.gated:
        gated(options)
        return
    if options.w8a8:
        w8a8(options)
        return
    linears(options)
    experts(options)


if __name__ == "__main__":
    main()
