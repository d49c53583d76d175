"""Small GGUF files, written with the gguf library: what the readers are tested on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV, FFN, LAYERS, HEAD_DIM = 64, 4, 2, 96, 2, 16
PIECES = ["▁", "a", "b", "c", "h", "e", "l", "o", "▁a", "he", "ll", "hell", "hello", "▁hello", "el", "▁h", "lo"]


def byte_vocab() -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges) of a byte-level vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ Ġ", "Ġ 1"]
    tokens += [merge.replace(" ", "") for merge in merges]
    return [*tokens, "<tag>"], [3, 3, 3] + [1] * (len(tokens) - 3) + [4], merges


def piece_vocab() -> tuple[list[str], list[int], list[float]]:
    """(tokens, types, scores) of a SentencePiece vocabulary with byte tokens and a user-defined run of spaces."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "  ", "<end_of_turn>", *PIECES]
    types = [3, 3, 3, 2] + [6] * 256 + [4, 3] + [1] * len(PIECES)
    return tokens, types, [0.0] * 262 + [-float(i) for i in range(len(PIECES))]


def hf_tensors(architecture: str, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random fp32 tensors by GGUF name, in Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if architecture == "gemma3" else [])
    for i in range(LAYERS):
        at = f"blk.{i}"
        shapes |= {f"{at}.{norm}.weight": (HIDDEN,) for norm in norms}
        for name, rows in (("q", HEADS), ("k", KV), ("v", KV)):
            shapes[f"{at}.attn_{name}.weight"] = (rows * HEAD_DIM, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{at}.attn_{name}.bias"] = (rows * HEAD_DIM,)
        if architecture in ("gemma3", "qwen3"):
            shapes |= {f"{at}.attn_q_norm.weight": (HEAD_DIM,), f"{at}.attn_k_norm.weight": (HEAD_DIM,)}
        shapes |= {
            f"{at}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}.ffn_gate.weight": (FFN, HIDDEN),
            f"{at}.ffn_up.weight": (FFN, HIDDEN),
            f"{at}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) + ("norm" in name) for name, shape in shapes.items()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q8_0",
    change: Callable[[GGUFWriter], Any] = lambda writer: None,
    skip: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "smollm",
) -> dict[str, torch.Tensor]:
    """Writes a model of `architecture` with matrices in `kind`; its tensors by GGUF name as written, rows as in Hugging
    Face. Keys in `skip` are left out, `change` may write more."""
    writer = GGUFWriter(path, architecture)
    sizes = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }
    sizes |= {"attention.sliding_window": 32} if architecture == "gemma3" else {"rope.dimension_count": HEAD_DIM}
    for key, value in sizes.items():
        if key not in skip:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 50000.0)
    tokens = _vocab(writer, architecture, pre, skip)
    change(writer)
    tensors = hf_tensors(architecture, tokens) | (extra or {})
    for name, value in tensors.items():
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            value = interleave(value, HEADS if ".attn_q." in name else KV)
        if value.ndim == 2:
            quantised = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(value) for name, value in tensors.items()}


def _vocab(writer: GGUFWriter, architecture: str, pre: str, skip: tuple[str, ...]) -> int:
    if architecture == "gemma3":
        tokens, types, scores = piece_vocab()
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(False)
        ids = (2, 1, 3)
    else:
        tokens, types, merges = byte_vocab()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        ids = (1, 2, 0)
    if "tokens" not in skip:
        writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(ids[0])
    writer.add_eos_token_id(ids[1])
    writer.add_unk_token_id(ids[2])
    return len(tokens)
