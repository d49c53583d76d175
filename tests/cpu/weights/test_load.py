"""Loading: every tensor in its place and layout, and every disagreement a ModelError."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from gguf_files import write_gguf
from tiny_models import FAMILIES

from offroad.errors import ModelError
from offroad.models.registry import resolve_model
from offroad.quant.packed import Packed, dequantise
from offroad.quant.scheme import canonical
from offroad.weights.gguf_source import GgufSource
from offroad.weights.load import MODEL, expected_tensors, load, verify_headers
from offroad.weights.safetensors_source import SafetensorsSource
from offroad.weights.source import Stored, TensorHeader

CPU = torch.device("cpu")


def dense(layer: int, name: str) -> str:
    return "dense"


@dataclass
class Changed:
    """A source whose tensors may be replaced, renamed away or added."""

    base: object
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def __getattr__(self, name: str):
        return getattr(self.base, name)

    @property
    def headers(self):
        headers = dict(self.base.headers)
        for name, tensor in self.tensors.items():
            headers.pop(name, None)
            if tensor is not None:
                headers[name] = TensorHeader(name, tuple(tensor.shape), "f32", tensor.nbytes)
        return headers

    def read(self, name: str) -> Stored:
        if name in self.tensors:
            return Stored(self.headers[name], self.tensors[name])
        return self.base.read(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_weights_are_the_checkpoint_s(family, tiny):
    folder, reference = tiny(family)
    source, state = SafetensorsSource(folder), reference.state_dict()
    spec = resolve_model(source.config).spec
    notes: list[float] = []
    weights = load(spec, source, dense, torch.float32, CPU, {}, lambda fraction, note: notes.append(fraction))
    assert torch.equal(weights.embed.tensors["w"], state["model.embed_tokens.weight"])
    assert torch.equal(weights.head.tensors["w"], state["lm_head.weight"])
    assert (weights.head is weights.embed) == (spec.head is None)
    for layer, loaded in zip(spec.layers, weights.layers, strict=True):
        for linear in layer.linears:
            packed = loaded.linears[linear.name]
            assert (packed.layout, packed.n, packed.k) == ("dense", linear.n, linear.k)
            stored = torch.cat([state[name].flatten(0, -2) for name in linear.tensors(state)])
            assert torch.equal(packed.tensors["w"], stored)
            assert (packed.bias is not None) == linear.bias
            if linear.bias:
                assert torch.equal(packed.bias, torch.cat([state[f"{m}.bias"] for m, _ in linear.parts]))
        for tensor in layer.tensors:
            expected = state[tensor.name] + (1.0 if tensor.transform == "plus_one" else 0.0)
            assert torch.equal(loaded.tensors[tensor.target].flatten(), expected.flatten())
    assert notes == sorted(notes)
    assert 0.0 <= notes[0] <= notes[-1] <= 1.0


def test_dtype_of_dense_weights_and_biases_and_fp32_of_norms(tiny):
    source = SafetensorsSource(tiny("qwen2")[0])
    weights = load(resolve_model(source.config).spec, source, dense, torch.bfloat16, CPU, {})
    qkv = weights.layers[0].linears["qkv"]
    assert qkv.tensors["w"].dtype == qkv.bias.dtype == weights.embed.tensors["w"].dtype == torch.bfloat16
    assert weights.tensors["norm"].dtype == weights.layers[0].tensors["input_norm"].dtype == torch.float32


def test_gguf_layouts_plus_one_and_packers(tmp_path):
    """Gemma's GGUF norms have their one already; a kernel's layout comes from its packer."""
    written = write_gguf(tmp_path / "m.gguf", "gemma3", kind="Q4_1")
    source = GgufSource(tmp_path / "m.gguf")
    spec = resolve_model(source.config).spec
    layouts = {
        (MODEL, "embed"): "affine4",
        (0, "linear:qkv"): "affine4",
        (0, "linear:o"): "affine8",
        (0, "linear:down"): "mine",
        (0, "linear:gate_up"): "dense",
    }

    def mine(packed: Packed) -> Packed:
        assert packed.layout == "affine4"
        return replace(packed, layout="mine", tensors={"sum": packed.tensors["s"].sum().reshape(1)})

    weights = load(spec, source, lambda i, n: layouts.get((i, n), "affine4"), torch.bfloat16, CPU, {"mine": mine})
    linears = weights.layers[0].linears
    assert {name: packed.layout for name, packed in linears.items()} == {
        "qkv": "affine4",
        "o": "affine8",
        "down": "mine",
        "gate_up": "dense",
    }
    assert linears["down"].tensors["sum"].numel() == 1
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    expected = torch.cat([dequantise(canonical(source.read(name))) for name in names])
    assert torch.equal(dequantise(linears["qkv"]), expected)
    gate_up = torch.cat(
        [dequantise(canonical(source.read(f"model.layers.0.mlp.{p}_proj.weight"))) for p in ("gate", "up")]
    )
    assert torch.equal(linears["gate_up"].tensors["w"], gate_up.bfloat16())
    assert torch.equal(
        dequantise(linears["o"]), dequantise(canonical(source.read("model.layers.0.self_attn.o_proj.weight")))
    )
    assert torch.equal(weights.layers[0].tensors["q_norm"], written["blk.0.attn_q_norm.weight"])
    assert torch.equal(weights.tensors["norm"], written["output_norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"tensor model.norm.weight; found: absent"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(5, 64)},
            r"up_proj.weight; found: shape \[5, 64\]; accepted: shape \[96, 64\]",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
            r"does not use; found: model.layers.0.self_attn.q_proj.bias",
        ),
        ({f"extra.{i}": torch.zeros(1) for i in range(8)}, r"extra.4 and 3 more"),
    ],
)
def test_headers_that_do_not_fit_are_refused_before_the_load(change, message, tiny):
    source = SafetensorsSource(tiny("llama")[0])
    spec = resolve_model(source.config).spec
    verify_headers(spec, source)
    with pytest.raises(ModelError, match=message) as caught:
        verify_headers(spec, Changed(source, change))
    assert caught.value.next


def test_ignored_tensors_are_not_left_over(tiny):
    source = SafetensorsSource(tiny("llama")[0])
    verify_headers(
        resolve_model(source.config).spec,
        Changed(source, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )


def test_a_kind_that_is_no_float_is_refused(tiny):
    source = Changed(SafetensorsSource(tiny("llama")[0]))
    name = "model.layers.0.mlp.up_proj.weight"
    headers = source.headers | {name: replace(source.headers[name], kind="f8_e4m3")}
    source.base = replace_headers(source.base, headers)
    with pytest.raises(ModelError, match="up_proj.weight; found: stored as f8_e4m3"):
        verify_headers(resolve_model(source.config).spec, source)


def replace_headers(source: SafetensorsSource, headers) -> SafetensorsSource:
    source.headers = headers
    return source


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.k_proj.bias",
    ],
)
def test_non_finite_values_are_refused_by_name(name, bad, tiny):
    source = SafetensorsSource(tiny("qwen2")[0])
    value = source.read(name).data.clone()
    value.view(-1)[3] = bad
    with pytest.raises(ModelError, match=f"tensor {name}; found: a non-finite"):
        load(resolve_model(source.config).spec, Changed(source, {name: value}), dense, torch.float32, CPU, {})


def test_values_that_fp16_cannot_hold_are_refused(tiny):
    source = SafetensorsSource(tiny("llama")[0])
    name = "model.layers.0.self_attn.q_proj.weight"
    value = source.read(name).data.clone()
    value[0, 0] = 1e6
    changed, spec = Changed(source, {name: value}), resolve_model(source.config).spec
    load(spec, changed, dense, torch.float32, CPU, {})
    with pytest.raises(ModelError, match="float16.*--dtype bfloat16"):
        load(spec, changed, dense, torch.float16, CPU, {})


def test_a_non_finite_scale_of_a_quantised_weight(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    source = GgufSource(tmp_path / "m.gguf")
    stored = source._stored["model.layers.1.mlp.down_proj.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[stored.offset : stored.offset + 2] = b"\x00\x7e"
    (tmp_path / "n.gguf").write_bytes(data)
    source = GgufSource(tmp_path / "n.gguf")
    with pytest.raises(ModelError, match="model.layers.1.mlp.down_proj.weight; found: a non-finite"):
        load(resolve_model(source.config).spec, source, lambda i, n: "affine8", torch.float32, CPU, {})


def test_expected_tensors_are_those_of_the_file(tiny):
    for family in FAMILIES:
        source = SafetensorsSource(tiny(family)[0])
        assert set(expected_tensors(resolve_model(source.config).spec, source.headers)) == set(source.headers)
