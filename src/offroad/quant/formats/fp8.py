"""Native FP8 (`quant_method` "fp8", as in DeepSeek-V3 and Qwen's own checkpoints): e4m3 weights, fp32 scales by block
of 128 x 128 (`weight_scale_inv`, which multiplies in spite of its name), or one scale a module (`weight_scale`).
"""

from __future__ import annotations

from typing import Any

from offroad.errors import ModelError
from offroad.quant.formats.base import REPAIR, Claim, Claims, Read, expect, scales
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

FLOAT = ("f32", "bf16", "f16")


class Fp8:
    """See the module."""

    suffixes = (".weight_scale_inv", ".weight_scale", ".input_scale")

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        found = Claims()
        block = config.get("weight_block_size")
        suffix = ".weight_scale_inv" if block else ".weight_scale"
        for name, header in headers.items():
            if not name.endswith(".weight") or header.kind != "f8_e4m3":
                continue
            module = name.removesuffix(".weight")
            scale, static = module + suffix, f"{module}.input_scale"
            found.others += [static] if static in headers else []
            found.claims.append(
                _block(headers, module, scale, tuple(block)) if block else _tensor(headers, module, scale)
            )
        listed = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
        claimed = {claim.name.removesuffix(".weight") for claim in found.claims}
        if wrong := sorted(claimed & set(listed)):
            found.notes.append(f"{wrong[0]} is listed as not quantised, and the file has it in fp8: the file decides")
        return found


def _block(headers: Headers, module: str, scale: str, block: tuple[int, int]) -> Claim:
    n, k = headers[f"{module}.weight"].shape
    rows, columns = block
    if rows < 1 or columns < 1:
        raise ModelError(
            "quantization_config: weight_block_size", found=list(block), accepted="[128, 128]", next=REPAIR
        )
    expect(headers, scale, FLOAT, (-(-n // rows), -(-k // columns)))

    def decode(read: Read) -> Packed:
        by_row = scales(read, scale).repeat_interleave(rows, dim=0)[:n].contiguous()
        return Packed("fp8", n, k, {"q": read(f"{module}.weight"), "s": by_row}, group=columns)

    return Claim(f"{module}.weight", (n, k), f"fp8.block{rows}x{columns}", (f"{module}.weight", scale), decode)


def _tensor(headers: Headers, module: str, scale: str) -> Claim:
    n, k = headers[f"{module}.weight"].shape
    shape = headers[scale].shape if scale in headers else ()
    expect(headers, scale, FLOAT, shape if shape in ((), (1,), (n,), (n, 1)) else (1,))

    def decode(read: Read) -> Packed:
        by_row = scales(read, scale).reshape(-1, 1).expand(n, 1).contiguous()
        return Packed("fp8", n, k, {"q": read(f"{module}.weight"), "s": by_row}, group=k)

    kind = "fp8.channel" if n in shape else "fp8.tensor"
    return Claim(f"{module}.weight", (n, k), kind, (f"{module}.weight", scale), decode)
