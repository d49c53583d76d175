"""A rank's part of the weights: with the others' it is the whole, bit for bit, and sums over ranks are the whole's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import encoders
import pytest
import torch
from checkpoints import write
from safetensors.torch import load_file, save_file

from offroad.errors import PlanError
from offroad.models.registry import resolve_source
from offroad.models.shard import shard
from offroad.models.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from offroad.quant.packed import Packed, dequantise
from offroad.quant.scheme import layout_of
from offroad.weights.load import LayerWeights, Weights, load
from offroad.weights.safetensors_source import SafetensorsSource

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_e", "gemma4_moe")
W4A16 = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def w4a16(name: str, w: torch.Tensor):
    return None if w.shape[0] % 8 or w.shape[1] % 32 else encoders.gptq(w, sym=False, group=16)


def ordered(name: str, w: torch.Tensor):
    if w.shape[0] % 8 or w.shape[1] % 32:
        return None
    return encoders.gptq(w, sym=False, group=16, order=torch.randperm(w.shape[1]).numpy())


SCHEMES = {
    "w4a16": (W4A16, w4a16),
    "order": (W4A16 | {"desc_act": True}, ordered),
    "fp8": (FP8, lambda name, w: encoders.fp8(w, 16, 16, name="weight_scale_inv")),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda name, w: None if w.shape[1] % 32 else encoders.nvfp4(w),
    ),
}
CASES = [(family, "dense") for family in FAMILIES]
CASES += [(f, s) for f in ("llama", "qwen3_5", "qwen3_5_moe", "gemma4") for s in ("w4a16", "fp8")]
CASES += [("llama", "order"), ("qwen3_5_moe", "nvfp4"), ("gemma4_moe", "fp8")]


def loaded(folder: Path, ranks: int, layout: str = "") -> tuple[ModelSpec, list[Weights]]:
    """The whole spec, and the weights of each rank, quantised ones in their canonical layout."""
    resolved, source = resolve_source(SafetensorsSource(folder))
    spec = resolved.spec
    linears = {(-1, li.use): li for li in [spec.embedding, *spec.linears, *([spec.head] if spec.head else [])]}
    linears |= {(i, li.use): li for i, layer in enumerate(spec.layers) for li in layer.linears}

    def layouts(layer: int, use: str) -> str:
        linear = linears[layer, use]
        return layout or layout_of(tuple(source.headers[name].kind for name in linear.tensors(source.headers)))

    args = (spec, source, layouts, torch.float32, CPU, {})
    return spec, [load(*args, rank=rank, ranks=ranks) for rank in range(ranks)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def folder(request, tiny, tmp_path_factory) -> Path:
    family, scheme = request.param
    plain = tiny(family)[0]
    if scheme == "dense":
        return plain
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("ranks")
    write(plain, made, *SCHEMES[scheme])
    return made / "quantised"


@pytest.fixture(scope="module")
def both(folder) -> tuple[ModelSpec, Weights, list[Weights]]:
    spec, [whole] = loaded(folder, 1)
    return spec, whole, loaded(folder, 2)[1]


def halves(name: str, layer: LayerSpec, parts: list[torch.Tensor]) -> torch.Tensor:
    """Two ranks' rows of a linear put together, by what each of its rows is for."""
    mixer, moe = layer.mixer, layer.moe
    if name == "qkv":
        assert isinstance(mixer, AttentionSpec)
        kv, count = mixer.kv_heads * mixer.head_dim, (len(dict(linears(layer))["qkv"].parts) - 1)
        # With one KV head both ranks have it.
        lengths = [mixer.q_width // 2] + [kv // 2 if mixer.kv_heads > 1 else kv] * count
        split = [part.split(lengths) for part in parts]
        shared = [
            a if i and mixer.kv_heads == 1 else torch.cat((a, b)) for i, (a, b) in enumerate(zip(*split, strict=True))
        ]
        assert mixer.kv_heads > 1 or all(torch.equal(a, b) for a, b in list(zip(*split, strict=True))[1:])
        return torch.cat(shared)
    if name in ("qkvz", "conv"):
        assert isinstance(mixer, GatedDeltaSpec)
        keys, values = mixer.key_heads * mixer.key_dim // 2, mixer.value_width // 2
        lengths = [keys, keys, values] + ([values] if name == "qkvz" else [])
        return torch.cat([torch.cat(pair) for pair in zip(*(part.split(lengths) for part in parts), strict=True)])
    if name in ("gate_up", "ba"):
        return torch.cat([torch.cat(pair) for pair in zip(*(part.chunk(2) for part in parts), strict=True)])
    if name == "experts_gate_up":
        each = [part.unflatten(0, (moe.experts, 2, moe.size // 2)) for part in parts]
        return torch.cat(each, dim=2).flatten(0, 2)
    assert name in ("o", "down", "experts_down"), name
    return torch.cat(parts, dim=1)


def linears(layer: LayerSpec):
    return [(linear.name, linear) for linear in layer.linears]


def test_parts_are_the_whole_bit_for_bit(both):
    spec, whole, parts = both
    for i, layer in enumerate(spec.layers):
        for name, linear in linears(layer):
            full, own = whole.layers[i].linears[name], [part.layers[i].linears[name] for part in parts]
            values = [dequantise(part) for part in own]
            assert not own[0].tensors.keys() & {"q"} or all(t.is_contiguous() for t in own[0].tensors.values())
            if linear.split == "none":
                assert all(torch.equal(part, dequantise(full)) for part in values), name
                continue
            assert torch.equal(halves(name, layer, values), dequantise(full)), name
            if full.bias is not None:
                assert torch.equal(halves(name, layer, [part.bias for part in own]), full.bias)
            dense = full.layout == "dense" or full.perm is not None and linear.split == "columns"
            assert own[0].layout == ("dense" if dense else full.layout), name
        for name, tensor in whole.layers[i].tensors.items():
            own = [part.layers[i].tensors[name] for part in parts]
            if name in ("a_log", "dt_bias"):
                assert torch.equal(torch.cat(own), tensor)
            elif name == "conv":
                assert torch.equal(halves(name, layer, own), tensor)
            else:
                assert all(torch.equal(part, tensor) for part in own), name


def test_what_stands_outside_layers(both):
    spec, whole, parts = both
    for name in ("embed", "head"):
        assert torch.equal(torch.cat([dequantise(getattr(p, name)) for p in parts]), dequantise(getattr(whole, name)))
    assert (parts[0].head is parts[0].embed) == (spec.head is None)
    for part in parts:
        assert {name: t.shape for name, t in part.tensors.items()} == {n: t.shape for n, t in whole.tensors.items()}
        assert all(torch.equal(dequantise(part.linears[n]), dequantise(whole.linears[n])) for n in whole.linears)


def test_shapes_are_those_of_the_rank_s_spec(both):
    spec, _, parts = both
    own = shard(spec, 2)
    for part in parts:
        for i, layer in enumerate(own.layers):
            assert {n: (w.n, w.k) for n, w in part.layers[i].linears.items()} == {
                li.name: (li.n, li.k) for li in layer.linears
            }
            for tensor in layer.tensors:
                assert part.layers[i].tensors[tensor.target].numel() == torch.Size(tensor.shape).numel()
        assert (part.embed.n, part.head.n) == (own.vocab, own.vocab)


def out(weight: Packed, x: torch.Tensor) -> torch.Tensor:
    y = x.double() @ dequantise(weight).double().T
    return y if weight.bias is None else y + weight.bias


def mlp(weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    gate, up = out(weights.linears["gate_up"], x).chunk(2, dim=-1)
    return out(weights.linears["down"], torch.nn.functional.silu(gate) * up)


def experts(weights: LayerWeights, x: torch.Tensor, count: int) -> torch.Tensor:
    """All experts of each token, summed."""
    gate_up, down = weights.linears["experts_gate_up"], weights.linears["experts_down"]
    gate, up = out(gate_up, x).unflatten(1, (count, 2, -1)).unbind(2)
    hidden = torch.nn.functional.silu(gate) * up
    return torch.einsum("tes,ehs->th", hidden, dequantise(down).double().unflatten(0, (count, -1)))


def attention(weights: LayerWeights, mixer: AttentionSpec, x: torch.Tensor) -> torch.Tensor:
    """Without RoPE, norms and masks."""
    qkv = out(weights.linears["qkv"], x)
    q, rest = qkv[:, : mixer.q_width], qkv[:, mixer.q_width :]
    q = q.unflatten(1, (mixer.heads, -1))
    gate = q[..., mixer.head_dim :].sigmoid() if mixer.output_gate else 1.0
    k, *v = rest.unflatten(1, (-1, mixer.kv_heads, mixer.head_dim)).unbind(1)
    k, v = (heads.repeat_interleave(mixer.heads // mixer.kv_heads, 1) for heads in (k, v[0] if v else k))
    scores = torch.einsum("thd,shd->hts", q[..., : mixer.head_dim], k).softmax(-1)
    return out(weights.linears["o"], (torch.einsum("hts,shd->thd", scores, v) * gate).flatten(1))


def test_sums_over_ranks_are_the_whole_s_outputs(both):
    spec, whole, parts = both
    own = shard(spec, 2)
    x = torch.randn(5, spec.hidden, generator=torch.Generator().manual_seed(1))
    for i, layer in enumerate(spec.layers):
        pairs = [(mlp(whole.layers[i], x), sum(mlp(part.layers[i], x) for part in parts))]
        if layer.moe:
            count = layer.moe.experts
            pairs.append((experts(whole.layers[i], x, count), sum(experts(p.layers[i], x, count) for p in parts)))
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.own_kv:
            mixer = own.layers[i].mixer
            pairs.append(
                (attention(whole.layers[i], layer.mixer, x), sum(attention(p.layers[i], mixer, x) for p in parts))
            )
        for expected, got in pairs:
            torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


def test_four_ranks_share_two_kv_heads(tiny):
    spec, parts = loaded(tiny("llama")[0], 4)
    [whole] = loaded(tiny("llama")[0], 1)[1]
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.heads, mixer.kv_heads) == (4, 2)
    full = dequantise(whole.layers[0].linears["qkv"])
    dim = mixer.head_dim
    for rank, part in enumerate(parts):
        head = rank // 2
        rows = [rank, 4 + head, 6 + head]  # a query head, its keys and its values
        expected = torch.cat([full[row * dim : (row + 1) * dim] for row in rows])
        assert torch.equal(dequantise(part.layers[0].linears["qkv"]), expected)


def test_dense_layouts_of_quantised_weights(tiny, tmp_path):
    write(tiny("llama")[0], tmp_path, *SCHEMES["fp8"])
    _, parts = loaded(tmp_path / "quantised", 2, "dense")
    _, [whole] = loaded(tmp_path / "quantised", 1)
    own = [part.layers[0].linears["down"].tensors["w"] for part in parts]
    assert torch.equal(torch.cat(own, dim=1), dequantise(whole.layers[0].linears["down"]))


def test_scales_of_a_cache_go_with_their_heads(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny("llama")[0], tmp_path / "scaled"))
    tensors = load_file(folder / "model.safetensors")
    for i in range(3):
        tensors[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor([0.5, 2.0])
        tensors[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor([0.25])
    write(tiny("llama")[0], tmp_path, *SCHEMES["fp8"])
    quantised = load_file(tmp_path / "quantised" / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    save_file(quantised | scales, tmp_path / "quantised" / "model.safetensors", metadata={"format": "pt"})
    _, parts = loaded(tmp_path / "quantised", 2)
    assert [part.kv_scales[1][0].tolist() for part in parts] == [[0.5], [2.0]]
    assert [part.kv_scales[1][1].tolist() for part in parts] == [[0.25], [0.25]]
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2


def test_what_ranks_cannot_divide_is_named(tiny):
    with pytest.raises(PlanError, match="layer 0: heads of 4"):
        loaded(tiny("llama")[0], 3)
