"""gpt-oss's MXFP4, against transformers' own dequantisation."""

from __future__ import annotations

import pytest
import torch
from checkpoints import meaning, opened, read
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offroad.errors import ModelError

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
X = "model.layers.0.mlp.experts"
E, I, H = 3, 40, 96  # noqa: E741


def blocks(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes [experts, rows, columns / 32, 16] and exponents."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (E, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 140, (E, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return codes, exponents


def checkpoint(change: dict | None = None):
    tensors = {f"{X}.gate_up_proj_bias": torch.randn(E, 2 * I).bfloat16()}
    for name, (codes, exponents) in {"gate_up_proj": blocks(2 * I, H), "down_proj": blocks(H, 64, 1)}.items():
        tensors |= {f"{X}.{name}_blocks": codes, f"{X}.{name}_scales": exponents}
    tensors |= change or {}
    return opened({name: t for name, t in tensors.items() if t is not None}, CONFIG)


def by_transformers(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """[experts, rows, columns]; the library has the transpose."""
    return convert_moe_packed_tensors(codes, exponents, dtype=torch.float32).transpose(1, 2)


def test_weights_are_transformers():
    source = checkpoint()
    kinds = {name: (header.kind, header.shape) for name, header in source.headers.items()}
    assert kinds == {
        f"{X}.gate_up_proj": ("fp4.mxfp4", (E, 2 * I, H)),
        f"{X}.down_proj": ("fp4.mxfp4", (E, H, 64)),
        f"{X}.gate_up_proj_bias": ("bf16", (E, 2 * I)),
    }
    assert torch.equal(meaning(source, f"{X}.down_proj"), by_transformers(*blocks(H, 64, 1)))
    assert source.notes == ()


def test_rows_of_gate_come_before_those_of_up():
    """The file has them in turns."""
    weight, expected = meaning(checkpoint(), f"{X}.gate_up_proj"), by_transformers(*blocks(2 * I, H))
    assert torch.equal(weight[:, :I], expected[:, 0::2])
    assert torch.equal(weight[:, I:], expected[:, 1::2])


def test_the_smallest_power_is_not_nothing():
    codes, exponents = blocks(H, 64, 1)
    exponents[1, 2, 0] = 0
    packed = read(checkpoint({f"{X}.down_proj_scales": exponents}), f"{X}.down_proj")
    assert packed.tensors["s"].view(E, H, 2)[1, 2, 0].double().item() == 2.0**-127


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_an_exponent_of_255_is_no_number(name):
    _, exponents = blocks(*((2 * I, H) if name == "gate_up_proj" else (H, 64)))
    exponents[0, 7, 1] = 255
    with pytest.raises(ModelError, match=f"tensor {X}.{name}_scales; found: a scale that is not finite"):
        checkpoint({f"{X}.{name}_scales": exponents}).read(f"{X}.{name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_proj_scales": None}, "down_proj_scales; found: absent"),
        ({"down_proj_blocks": None}, "down_proj_scales; found: no weight that it belongs to"),
        (
            {"down_proj_blocks": torch.zeros(E, H, 32, dtype=torch.uint8)},
            r"down_proj_blocks; found: shape \[3, 96, 32\]",
        ),
        (
            {"down_proj_blocks": torch.zeros(E, H, 4, 8, dtype=torch.uint8)},
            r"found: shape \[3, 96, 4, 8\]; accepted.*16",
        ),
        ({"gate_up_proj_blocks": torch.zeros(E, 79, 3, 16, dtype=torch.uint8)}, "as many rows of gate as of up"),
        ({"down_proj_blocks": torch.zeros(E, H, 2, 16)}, "down_proj_blocks; found: stored as f32; accepted: u8"),
        (
            {"down_proj_scales": torch.zeros(E, H, 3, dtype=torch.uint8)},
            r"scales; found: shape .*accepted.*\[3, 96, 2\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ModelError, match=message) as caught:
        checkpoint({f"{X}.{name}": tensor for name, tensor in change.items()})
    assert caught.value.next


def test_the_file_decides_and_a_list_that_disagrees_is_noted():
    held = {f"{X}.down_proj_blocks": blocks(H, 64)[0], f"{X}.down_proj_scales": blocks(H, 64)[1]}
    source = opened(held, CONFIG | {"modules_to_not_convert": ["model.layers.*.mlp*"]})
    assert source.notes[0].startswith(f"{X}.down_proj is listed as not quantised")
