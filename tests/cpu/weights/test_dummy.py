"""Dummy weights: as a checkpoint of the scheme stores them, the same for the same name, and activations stay finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offroad.engine import Engine
from offroad.errors import SettingsError
from offroad.models.registry import resolve_model
from offroad.quant.packed import dequantise
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.weights.dummy import SCHEMES, DummySource
from offroad.weights.load import verify_headers

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
DENSE = ["embed=torch.embed", "linear=torch.linear"]


def config(name: str, **changes) -> dict:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    inner = values.get("text_config", values)
    inner.update(changes)
    return values


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_headers_are_those_of_the_scheme(name: str, scheme: str):
    source = DummySource(config(name), "cpu", scheme)
    kinds = {header.kind for header in source.headers.values()}
    quantised = {"w4a16-g32": "affine4.w4a16-g32", "w4a16-g128": "affine4.w4a16-g128", "fp8-block": "fp8.block128x128"}
    assert kinds == {"bf16"} | ({quantised[scheme]} if scheme in quantised else set())
    spec = resolve_model(source.config).spec
    outside = [spec.embedding, *spec.linears, *([spec.head] if spec.head else [])]
    kept = [linear for layer in spec.layers for linear in layer.linears if linear.name in ("ba", "router")]
    for linear in [*outside, *kept]:
        assert {source.headers[name].kind for name in linear.tensors(source.headers)} == {"bf16"}
    verify_headers(spec, source)


def test_sizes_of_the_27b():
    """By hand: 24.35e9 quantised weights at 4 bits and a bf16 scale for 128, and 2 x 248,320 x 5,120 in bf16."""
    w4 = sum(h.nbytes for h in DummySource(config("qwen3.5-27b"), "cpu", "w4a16-g128").headers.values())
    assert 17.5e9 < w4 < 18.3e9
    assert sum(h.nbytes for h in DummySource(config("qwen3.5-27b"), "cpu").headers.values()) == w4  # the config's own


@pytest.mark.parametrize(("scheme", "layout"), [("w4a16-g32", "affine4"), ("fp8-block", "fp8"), ("none", None)])
def test_values_keep_the_size_of_what_goes_through(scheme: str, layout: str | None):
    source = DummySource(config("qwen3-8b", num_hidden_layers=1, hidden_size=512), "cpu", scheme)
    name = "model.layers.0.mlp.gate_proj.weight"
    stored = source.read(name)
    assert (stored.packed and stored.packed.layout) == layout
    w = dequantise(stored.packed) if stored.packed else stored.data.float()
    assert w.shape == source.headers[name].shape
    assert torch.isfinite(w).all()
    out = torch.randn(64, w.shape[1]) @ w.T
    assert 0.9 < out.std() < 1.1
    again = source.read(name)
    assert torch.equal(again.data.view(torch.uint8), stored.data.view(torch.uint8))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(SettingsError, match="quantization"):
        DummySource(config("qwen3-8b"), "cpu", "w3a16")


@pytest.mark.parametrize("scheme", ["none", "w4a16-g128", "fp8-block"])
@pytest.mark.parametrize("name", ["qwen3.5-27b", "gemma-4-31b"])
def test_an_engine_runs_on_them(name: str, scheme: str):
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=12, vocab_size=400, head_dim=64)
    if name == "gemma-4-31b":
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, global_head_dim=64)
    else:
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4)
        sizes |= dict(linear_key_head_dim=32, linear_value_head_dim=32, mtp_num_hidden_layers=0)
    source = DummySource(config(name, **sizes), "cpu", scheme)
    settings = Settings.of(
        model="dummy", device="cpu", dtype="bfloat16", max_model_len=128, max_num_seqs=2, kernel=DENSE
    )
    engine = Engine(settings, source=source)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.submit(Request(id="a", prompt_ids=list(range(40)), params=params))
    events = []
    while engine.has_work():
        events += engine.step()
    assert [event.error for event in events] == [None] * len(events)
    assert sum(len(event.token_ids) for event in events) == 6
    engine.close()
