"""A GGUF seen as a Hugging Face checkpoint: transformers reads the same file and is the oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import torch
from gguf_files import HEAD_DIM, byte_vocab, piece_vocab, write_gguf
from safetensors.torch import load_file

from offroad.errors import ModelError
from offroad.models.registry import resolve_model
from offroad.quant.packed import dequantise
from offroad.quant.scheme import canonical
from offroad.quant.write import quantise
from offroad.weights.gguf_source import GgufSource
from offroad.weights.gguf_tokenizer import merges_by_score
from offroad.weights.load import verify_headers
from offroad.weights.locate import open_path

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_agrees_with_transformers(architecture, tmp_path):
    from transformers import AutoConfig

    write_gguf(tmp_path / "m.gguf", architecture)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    ours = dict(GgufSource(tmp_path / "m.gguf").config)
    rope, theirs_rope = ours.pop("rope_theta"), theirs.pop("rope_parameters")
    if architecture == "gemma3":
        assert theirs_rope["sliding_attention"]["rope_theta"] == ours.pop("rope_local_base_freq")
        theirs_rope = theirs_rope["full_attention"]
        # transformers keeps its default of 256 whatever the file says; llama.cpp scales by the head's size.
        assert (ours.pop("query_pre_attn_scalar"), theirs.pop("query_pre_attn_scalar")) == (HEAD_DIM, 256)
    assert theirs_rope["rope_theta"] == rope
    ours.pop("architectures")
    if architecture.startswith("qwen"):  # transformers does not read it from these files
        assert ours.pop("head_dim") == HEAD_DIM
    if "vocab_size" in ours:  # transformers leaves its default when the file does not name it
        assert ours.pop("vocab_size") == len(piece_vocab()[0] if architecture == "gemma3" else byte_vocab()[0])
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_is_found_with_its_values(architecture, tmp_path):
    """Names, row order of q and k, and the spec's own check of shapes: nothing is missing or left over."""
    written = write_gguf(tmp_path / "m.gguf", architecture)
    source = GgufSource(tmp_path / "m.gguf")
    verify_headers(resolve_model(source.config).spec, source)
    assert len(source.headers) == len(written)
    assert source.conventions == ({"norm_plus_one"} if architecture == "gemma3" else frozenset())
    norm = "pre_feedforward" if architecture == "gemma3" else "post_attention"
    names = {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.ffn_norm.weight": f"model.layers.0.{norm}_layernorm.weight",
    }
    if architecture == "qwen2":
        names["blk.1.attn_k.bias"] = "model.layers.1.self_attn.k_proj.bias"
    for stored, name in names.items():
        got = source.read(name)
        value = got.data if got.data.ndim == 1 else dequantise(canonical(got))
        torch.testing.assert_close(value, written[stored], atol=0.01, rtol=0)


def test_q_and_k_rows_equal_transformers_(tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "m.gguf", "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    source = GgufSource(tmp_path / "m.gguf")
    theirs = model.state_dict()
    assert set(source.headers) == set(theirs) - {"lm_head.weight"}
    for name in source.headers:
        got = source.read(name)
        assert torch.equal(got.data if got.data.ndim == 1 else dequantise(canonical(got)), theirs[name]), name


def test_llama3_factors_become_parameters(tmp_path):
    """The reference is the rotation that transformers makes from the parameters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(
        rope_type="llama3",
        rope_theta=50000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=scaling)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 50000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": (plain / scaled).astype(np.float32)})
    source = GgufSource(tmp_path / "m.gguf")
    scaling.pop("rope_theta")
    assert source.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in source.headers
    write_gguf(tmp_path / "n.gguf", extra={"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)})
    with pytest.raises(ModelError, match="rope_freqs"):
        GgufSource(tmp_path / "n.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(architecture="mamba"), "general.architecture.*llama, qwen2, qwen3, gemma3"),
        (dict(skip=("block_count",)), "block_count.*absent"),
        (dict(change=lambda w: w.add_uint32("llama.expert_count", 8)), "expert_count"),
        (dict(change=lambda w: w.add_uint32("llama.hyper.streams", 4)), "unknown metadata.*hyper.streams"),
        (dict(change=lambda w: w.add_string("llama.rope.scaling.type", "yarn")), "yarn.*none, linear"),
        (dict(change=lambda w: w.add_array("llama.attention.layers", [1, 2])), "unknown metadata"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(arguments, message, tmp_path):
    write_gguf(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ModelError, match=message):
        GgufSource(tmp_path / "m.gguf")


def test_linear_scaling_is_taken(tmp_path):
    def change(writer):
        writer.add_string("gemma3.rope.scaling.type", "linear")
        writer.add_float32("gemma3.rope.scaling.factor", 8.0)

    write_gguf(tmp_path / "m.gguf", "gemma3", change=change)
    assert GgufSource(tmp_path / "m.gguf").config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


TEXTS = [
    "hello hello",
    "  hello",
    "a   hello ",
    "12345 6",
    "x  1",
    "\n\n hello\t",
    "héllo 漢字 😀 👩‍👧",
    "\x00\x7f",
    "it's I'LL",
    "<|im_start|>user\nhello<|im_end|>",
    "<tag>",
    "e\u0301",
    "\u00a0 \u200b",
    "a\r\nb",
    "def f(x):\n    return 12",
    "",
    " ",
    "مرحبا हिन्दी",
]


def byte_tokenizer(tmp_path, pre: str) -> tokenizers.Tokenizer:
    write_gguf(tmp_path / "m.gguf", "llama", pre=pre)
    return tokenizers.Tokenizer.from_str(GgufSource(tmp_path / "m.gguf").tokenizer().tokenizer_json)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_decodes_to_the_text(text, tmp_path):
    tokenizer = byte_tokenizer(tmp_path, "smollm")
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_byte_level_equals_transformers(tmp_path):
    """transformers' GGUF path has no pre-tokenizer by name: the words of GPT-2, which is what "gpt-2" asks for."""
    from transformers import AutoTokenizer

    ours = byte_tokenizer(tmp_path, "gpt-2")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "3", "Ġ1", "ĠĠ", "Ġhello"]),
        ("smollm", ["1", "2", "3", "Ġ", "1", "ĠĠ", "Ġhello"]),
        ("qwen2", ["1", "2", "3", "Ġ", "1", "ĠĠ", "Ġhello"]),
        ("llama-bpe", ["12", "3", "Ġ", "1", "ĠĠ", "Ġhello"]),
    ],
)
def test_pre_tokenizers_split_digits_and_spaces_in_their_own_way(pre, expected, tmp_path):
    assert byte_tokenizer(tmp_path, pre).encode("123 1   hello").tokens == expected


def test_unknown_pre_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="tokenizer.ggml.pre.*'default'.*smollm"):
        byte_tokenizer(tmp_path, "default")


def sentencepiece(text: str) -> list[int]:
    """SentencePiece's BPE by its definition: cut out user-defined and control pieces, then join the neighbours whose
    piece has the best score, leftmost first; what is no piece becomes its bytes."""
    tokens, types, scores = piece_vocab()
    ids = {token: i for i, token in enumerate(tokens)}
    cut = sorted((tokens[i] for i, kind in enumerate(types) if kind in (3, 4)), key=len, reverse=True)
    for token in cut:
        if token in text:
            left, _, right = text.partition(token)
            return sentencepiece(left) + [ids[token]] + sentencepiece(right)
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if types[ids.get(a + b, 0)] == 1
        ]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out


def test_sentencepiece_vocabulary(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma3")
    files = GgufSource(tmp_path / "m.gguf").tokenizer()
    tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    texts = [*TEXTS, "hellohell", "ahello hel lo", "   hello", "<bos>hello<end_of_turn>", "helhello  a"]
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.ids == sentencepiece(text), text
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert (files.bos_token, files.eos_token, files.add_bos) == ("<bos>", "<eos>", True)
    assert files.eos_ids == (1, piece_vocab()[0].index("<end_of_turn>"))


def test_merges_are_best_score_first_with_every_split():
    merges = merges_by_score(
        ["a", "b", "ab", "ba", "aba", "<x>"], [1, 1, 1, 1, 1, 3], [0.0, 0.0, -2.0, -1.0, -3.0, 0.0]
    )
    assert merges == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_prefix_space_is_added_when_the_file_says_so(tmp_path):
    write_gguf(
        tmp_path / "m.gguf", "gemma3", change=lambda writer: writer.kv_data[0].pop("tokenizer.ggml.add_space_prefix")
    )
    tokenizer = tokenizers.Tokenizer.from_str(GgufSource(tmp_path / "m.gguf").tokenizer().tokenizer_json)
    assert tokenizer.encode("hello").tokens == ["▁hello"]
    assert tokenizer.decode(tokenizer.encode("hello").ids) == "hello"


def test_template_and_special_tokens_of_a_byte_level_model(tmp_path):
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_chat_template("{{ messages }}"))
    files = GgufSource(tmp_path / "m.gguf").tokenizer()
    assert (files.chat_template, files.bos_token, files.eos_ids, files.add_bos) == (
        "{{ messages }}",
        "<|im_start|>",
        (2, 0),
        False,
    )
    added = {token["content"]: token["special"] for token in json.loads(files.tokenizer_json)["added_tokens"]}
    assert added == {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tag>": False}


def test_a_vocabulary_without_tokens_is_refused(tmp_path):
    write_gguf(tmp_path / "m.gguf", skip=("tokens",))
    with pytest.raises(ModelError, match="tokenizer.ggml.tokens.*absent"):
        GgufSource(tmp_path / "m.gguf").tokenizer()


def test_a_gguf_s_norms_lose_the_one_that_the_model_adds(tmp_path):
    write_gguf(tmp_path / "m.gguf", "gemma3", kind="Q8_0")
    source = open_path(tmp_path / "m.gguf")
    quantise(source, tmp_path / "q", "fp8-block", lambda fraction, note: None)
    written = load_file(tmp_path / "q" / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        torch.testing.assert_close(written[name] + 1.0, source.read(name).data.float())
