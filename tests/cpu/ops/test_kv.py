"""Stored keys and values: 8-bit kinds round as they should, never overflow, and read back the same in every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offroad import LLM, SamplingParams
from offroad.device.profile import load_profile
from offroad.errors import PlanError
from offroad.ops.kv import as_stored, decode, encode, read, write
from offroad.ops.plan import choose_dtypes
from offroad.run.rows import PagedView
from offroad.settings import Settings

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def pages(dtype: torch.dtype, scale: list[float] | None = None) -> PagedView:
    k, v = (torch.empty(5, 8, 2, 4, dtype=dtype) for _ in "kv")
    scales = None if scale is None else torch.tensor(scale)
    return PagedView(k, v, torch.zeros(2, 4, dtype=torch.int32), 8, k_scale=scales, v_scale=scales)


def test_a_byte_of_e5m2_is_the_upper_half_of_fp16():
    """What lets units without fp8 read it: the byte shifted left by 8 is the same number in fp16."""
    codes = torch.arange(256, dtype=torch.uint8)
    shifted = (codes.to(torch.int32) << 8).to(torch.int16).view(torch.float16)
    converted = codes.view(torch.float8_e5m2).half()
    number = ~converted.isnan()
    assert torch.equal(converted.view(torch.int16)[number], shifted.view(torch.int16)[number])
    assert torch.equal(converted.isnan(), shifted.isnan())


@pytest.mark.parametrize("dtype", KINDS)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), st.floats(1e-3, 1e3))
def test_rounding_is_to_the_nearest_and_limited(dtype, values: list[float], scale: float):
    x = torch.tensor(values).view(1, 2, 4)
    by_head = torch.tensor([scale, 2 * scale])
    back = decode(encode(x, dtype, by_head), by_head)
    assert torch.isfinite(back).all()
    table = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    table = table[torch.isfinite(table)]
    for head in range(2):
        stored = x[0, head].double() / by_head[head].double()
        nearest = (table.double()[:, None] - stored).abs().min(0).values
        distance = (back[0, head].double() / by_head[head].double() - stored).abs()
        assert (distance <= nearest + 1e-6 * stored.abs() + 1e-12).all()  # 1e-6: the products with the scale are fp32


@pytest.mark.parametrize("dtype", [*KINDS, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [None, [0.5, 3.0]])
def test_pages_give_back_what_the_step_itself_saw(dtype, scale):
    view = pages(dtype, scale)
    k, v = torch.randn(2, 3, 2, 4) * 20
    blocks, rows = torch.tensor([3, 3, 1]), torch.tensor([0, 7, 2])
    write(view, blocks, rows, k, v)
    seen_k, seen_v = as_stored(view, k, v)
    read_k, read_v = (x.view(5, 8, 2, 4) for x in read(view, torch.arange(5)))
    assert torch.equal(read_k[blocks, rows], seen_k)
    assert torch.equal(read_v[blocks, rows], seen_v)


def dtypes(profile: str, asked: str) -> tuple[str, str, list[str]]:
    device = load_profile(profile)
    return choose_dtypes("bfloat16", device, Settings.of(model="m", kv_cache_dtype=asked))


@pytest.mark.parametrize(
    ("profile", "asked", "kind"),
    [
        ("v100-32gb", "fp8", "float8_e5m2"),
        ("v100-32gb", "fp8_e5m2", "float8_e5m2"),
        ("v100-32gb", "auto", "float16"),
        ("h100-80gb", "fp8", "float8_e4m3fn"),
        ("gb10", "fp8", "float8_e4m3fn"),
        ("rtx5090", "fp8_e5m2", "float8_e5m2"),
        ("h100-80gb", "auto", "bfloat16"),
    ],
)
def test_what_fp8_means_on_a_device(profile: str, asked: str, kind: str):
    _, kv, notes = dtypes(profile, asked)
    assert kv == kind
    assert any(f"fp8 is {kind[7:11]}" in note for note in notes) == (asked == "fp8")


def test_e4m3_without_conversions_is_refused_with_the_way_out():
    with pytest.raises(PlanError, match=r"cannot convert.*fp8_e5m2"):
        dtypes("v100-32gb", "fp8_e4m3")


@pytest.mark.parametrize("family", ["llama", "gemma4_e", "qwen3_5"])
@pytest.mark.parametrize("kind", ["fp8_e5m2", "fp8_e4m3", "float16"])
def test_models_answer_alike_however_the_prompt_is_cut(family: str, kind: str, tiny):
    folder, _ = tiny(family)
    prompts = [{"prompt_token_ids": [3 + i * 5 % 280 for i in range(n)]} for n in (5, 70, 150)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for chunk in (512, 16):
        llm = LLM(str(folder), device="cpu", kv_cache_dtype=kind, max_num_batched_tokens=chunk)
        for _ in range(2):  # the second time from the prefix cache
            answers.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
        assert (
            llm.engine.plan.kv_bytes_per_token * (4 if kind.startswith("fp8") else 2)
            == LLM(str(folder), device="cpu").engine.plan.kv_bytes_per_token
        )
    assert answers[1:] == answers[:-1]
