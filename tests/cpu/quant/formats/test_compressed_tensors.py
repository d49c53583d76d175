"""Checkpoints of the compressed-tensors library: weights bit for bit the library's, logits as transformers has them."""

from __future__ import annotations

import pytest
import torch
from ct_files import PROJECTIONS, write

from offroad import LLM, SamplingParams
from offroad.models.registry import resolve_source
from offroad.quant.packed import dequantise
from offroad.quant.scheme import canonical, layout_of
from offroad.weights.locate import open_path

KINDS = {
    "w4-g32": "affine4.w4a16-g32",
    "w4-g32-asym": "affine4.w4a16-g32-asym",
    "w4-channel": "affine4.w4a16-channel",
    "w4-channel-asym": "affine4.w4a16-channel-asym",
    "w4-g16": "affine8.w4a16-g16",
    "w8-g32": "affine8.w8a16-g32",
    "w8-g32-asym": "affine8.w8a16-g32-asym",
    "w8-channel": "affine8.w8a16-channel",
    "w2-g32-asym": "affine4.w2a16-g32-asym",
    "w3-g32": "affine4.w3a16-g32",
    "w5-g32-asym": "affine8.w5a16-g32-asym",
    "w6-channel": "affine8.w6a16-channel",
    "int8-channel": "affine8.w8a8-channel",
    "int8-channel-asym": "affine8.w8a8-channel-asym",
    "int8-g32": "affine8.w8a8-g32",
    "fp8-tensor": "fp8.tensor",
    "fp8-channel": "fp8.channel",
    "fp8-block32x32": "fp8.block32x32",
    "fp8-block128x128": "fp8.block128x128",
    "mxfp8": "fp8.mxfp8",
    "nvfp4": "fp4.nvfp4",
    "mxfp4": "fp4.mxfp4",
}
FORCED = {"default": (), "reference": ("linear=torch.reference_linear",)}


def check_weights(written, kind: str | None) -> None:
    """Every quantised weight of the file is the library's, bit for bit."""
    _, source = resolve_source(open_path(written.folder))
    for name, weight in written.weights.items():
        header = source.headers[name]
        assert header.shape == tuple(weight.shape)
        assert kind in (None, header.kind)
        packed = canonical(source.read(name))
        assert packed.layout == layout_of((header.kind,))
        assert all(tensor.is_contiguous() for tensor in packed.tensors.values())
        assert torch.equal(dequantise(packed), weight.flatten(0, -2)), name


@torch.inference_mode()
def check_logits(written, forced: tuple[str, ...] = (), prompt: int = 40) -> LLM:
    """Log-probabilities behind a prompt, and of an answer, are the dequantised reference model's."""
    ids = torch.randint(3, 290, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(str(written.folder), device="cpu", dtype="float32", max_num_seqs=2, kernel=list(forced))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=8)
    [out] = llm.generate({"prompt_token_ids": ids}, params)[0].outputs
    logits = written.reference(torch.tensor([ids + out.token_ids])).logits[0, len(ids) - 1 : -1]
    for row, entry in zip(logits.log_softmax(-1), out.logprobs, strict=True):
        best = row.topk(8)
        assert [token for token, _ in entry.top[:8]] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([lp for _, lp in entry.top[:8]]), best.values, atol=1e-4, rtol=0)
    llm.close()
    return llm


@pytest.mark.parametrize("name", KINDS)
def test_each_scheme_has_the_library_s_weights_and_transformers_logits(name, tiny, tmp_path):
    written = write(tiny("llama"), tmp_path / "m", {PROJECTIONS: name})
    check_weights(written, KINDS[name])
    for forced in FORCED.values():
        check_logits(written, forced)


# 32 divides neither the columns of every projection nor those of routers' outputs: those stay in floats, or by row.
FAMILIES = {
    "qwen3_5": {PROJECTIONS: "w4-g32"},
    "gemma4": {PROJECTIONS: "w4-g32"},
    "gemma4_moe": {r".*experts\.down_proj": "w4-channel", r"(?!.*router)" + PROJECTIONS: "w4-g32"},
    "qwen3_5_moe": {r"(?!.*shared_expert\.down_proj)" + PROJECTIONS: "w4-g32"},
}
CASES = [("qwen3_5", "each"), ("gemma4", "each")]
CASES += [(family, experts) for family in ("gemma4_moe", "qwen3_5_moe") for experts in ("each", "fused")]


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block32x32", "nvfp4", "int8-channel"])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_families_in_other_schemes(family, name, tiny, tmp_path):
    written = write(tiny(family), tmp_path / "m", {PROJECTIONS: name})
    check_weights(written, KINDS[name])
    check_logits(written)


@pytest.mark.parametrize(("family", "experts"), CASES)
def test_families_in_4_bits(family, experts, tiny, tmp_path):
    """Experts have tensors each, or one stack a projection as some tools write it, without metadata of its shape."""
    written = write(tiny(family), tmp_path / "m", FAMILIES[family], experts=experts)
    check_weights(written, None)
    check_logits(written)
    check_logits(written, FORCED["reference"])
