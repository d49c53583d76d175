"""GPTQ with 4 and 8 bits: codes packed along the columns, in their order; with `desc_act`, groups stand apart in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, REPAIR, Claim, Claims, Read, expect, note_listed, scales, sizes
from offroad.quant.formats.integers import affine, group_of, kind, nibbles, pairs, refuse_bits
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

# Added to a word of stored zeros. Version 1 stores zero - 1, subtracted from whole words, so that a zero of 0 borrows
# from its neighbour: only adding to the whole word gives both back.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class _Rule:
    """How one module is quantised. `first`: zeros are stored as in version 1."""

    bits: int
    size: object
    sym: bool
    desc_act: bool
    first: bool


class Gptq:
    """See the module."""

    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        stored = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if stored not in ("gptq", "gptq_v2"):
            raise ModelError(
                "quantization_config: checkpoint_format (gptq)",
                found=stored,
                accepted="gptq, gptq_v2",
                next="use another quantisation of the model",
            )
        modules = [name.removesuffix(".qweight") for name in headers if name.endswith(".qweight")]
        found = Claims([_claim(headers, m, _rule(config, m, stored == "gptq")) for m in modules])
        note_listed(found, lambda module: _left_out(config, module))
        return found


def _override(config: dict[str, Any], module: str) -> dict[str, Any] | None:
    """What `dynamic` says of the module: the first expression that matches from its start; None: not quantised."""
    for pattern, values in (config.get("dynamic") or {}).items():
        try:
            fits = re.match(pattern.removeprefix("-:").removeprefix("+:"), module)
        except re.error as error:
            raise ModelError(
                "quantization_config: dynamic (gptq)",
                found=f"{pattern!r}: {error}",
                accepted="regular expressions after +: or -:",
                next=REPAIR,
            ) from error
        if fits:
            return None if pattern.startswith("-:") else values
    return {}


def _left_out(config: dict[str, Any], module: str) -> bool:
    if _override(config, module) is None:
        return True
    if module.split(".")[-1] == "lm_head":
        return not config.get("lm_head")
    listed = config.get("modules_in_block_to_quantize") or []
    names = [name for entry in listed for name in ([entry] if isinstance(entry, str) else entry)]
    return bool(names) and not any(module.endswith(f".{name}") for name in names)


def _rule(config: dict[str, Any], module: str, first: bool) -> _Rule:
    values = config | (_override(config, module) or {})
    bits, size = values.get("bits", 4), values.get("group_size", 128)
    if bits not in _ONES:
        raise refuse_bits(f"gptq, {module}", bits, "4, 8")
    return _Rule(bits, size, bool(values.get("sym", True)), bool(values.get("desc_act", False)), first)


def _claim(headers: Headers, module: str, rule: _Rule) -> Claim:
    names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    words, n = sizes(headers, names["qweight"], ("i32",), 2)
    bits, k = rule.bits, words * 32 // rule.bits
    group = group_of(module, k, rule.size)
    expect(headers, names["scales"], FLOAT, (k // group, n))
    if not rule.sym:
        expect(headers, names["qzeros"], ("i32",), (k // group, n * bits // 32))
    there = {part: name for part, name in names.items() if name in headers}
    if "g_idx" in there:
        expect(headers, names["g_idx"], ("i32", "i64"), (k,))
    several = "g_idx" in there and group < k  # in one group there is nothing to order

    def decode(read: Read) -> Packed:
        q = read(names["qweight"]).contiguous().view(torch.uint8).view(words, n, 4)
        q = q.transpose(0, 1).reshape(n, 4 * words)  # a byte holds one code of 8 bits, or the codes of two columns
        perm = _order(read, names["g_idx"], group, rule.desc_act) if several else None
        if perm is not None:
            q = q[:, perm] if bits == 8 else pairs(nibbles(q)[:, perm])
        zero = None if rule.sym else _zeros(read(names["qzeros"]), rule)
        return affine(q, scales(read, names["scales"]).T.contiguous(), zero, k, bits, perm)

    name = "gptq" if bits == 4 else f"gptq{bits}"
    return Claim(
        f"{module}.weight",
        (n, k),
        kind(name, bits, rule.size, group, several and rule.desc_act),
        tuple(there.values()),
        decode,
    )


def _zeros(words: torch.Tensor, rule: _Rule) -> torch.Tensor:
    """Zeros [n, groups] of words [groups, n * bits / 32]."""
    if rule.first:
        words = (words.long() + _ONES[rule.bits]).to(torch.int32)
    codes = nibbles(words) if rule.bits == 4 else words.contiguous().view(torch.uint8)
    return codes.T.contiguous()


def _order(read: Read, name: str, group: int, desc_act: bool) -> torch.Tensor | None:
    """The columns, group by group; None if they stand so in the file."""
    groups = read(name).long()
    k = len(groups)
    if torch.equal(groups, torch.arange(k) // group):
        return None
    if not desc_act:
        raise ModelError(
            f"tensor {name}",
            found="groups of columns that stand apart, and desc_act false",
            accepted=f"column k in group k // {group}",
            next='set "desc_act": true in the quantization_config if the model was quantised so',
        )
    if not torch.equal(groups.sort().values, torch.arange(k) // group):
        raise ModelError(
            f"tensor {name}",
            found=f"groups {groups.min().item()} to {groups.max().item()} of unequal size",
            accepted=f"{k // group} groups of {group} columns",
            next=REPAIR,
        )
    return groups.argsort(stable=True)
