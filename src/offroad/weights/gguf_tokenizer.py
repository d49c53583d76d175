"""A `tokenizer.json` from a GGUF's vocabulary: byte-level BPE ("gpt2") or SentencePiece BPE with scores ("llama")."""

from __future__ import annotations

import json
from typing import Any

from offroad.errors import ModelError
from offroad.weights.gguf_file import GgufFile
from offroad.weights.source import TokenizerFiles

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Tokens that end a turn or a document in the families that use them; a GGUF names only one eos.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|end_of_text|>")
_SPACE = "▁"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = _BYTES | {"use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


# `tokenizer.ggml.pre`: (pre-tokenizer, normalizer, whether a whole word in the vocabulary is taken without merging).
_LLAMA3 = (_split(_WORDS + r"\p{N}{1,3}" + _REST), None, True)
_PRE: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "gpt-2": (_GPT2, None, False),
    "smollm": (
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]},
        None,
        False,
    ),
    "qwen2": (_split(_WORDS + r"\p{N}" + _REST), {"type": "NFC"}, False),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def tokenizer_of(file: GgufFile) -> TokenizerFiles:
    """What the text side needs. Raises ModelError for a vocabulary that is absent, inconsistent or of another kind."""
    tokens = _listed(file, "tokens", str)
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.where}: tokenizer.ggml.tokens", found="a token twice", accepted="each token once")
    types = _listed(file, "token_type", int, [NORMAL] * len(tokens))
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        body, bos_default = _byte_level(file, tokens)
    elif model == "llama":
        body, bos_default = _sentencepiece(file, tokens, types), True
    else:
        raise ModelError(
            f"{file.where}: tokenizer.ggml.model",
            found=repr(model),
            accepted="gpt2, llama",
            next="use the checkpoint's safetensors form, which has a tokenizer.json",
        )
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (CONTROL, UNKNOWN),
        }
        for i, kind in enumerate(types)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and tokens[i]
    ]
    text = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **body,
    }
    bos, eos = _token(file, "bos", tokens), _token(file, "eos", tokens)
    template = file.metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=json.dumps(text, ensure_ascii=False),
        chat_template=template if isinstance(template, str) else None,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        eos_ids=_ends(file, tokens, types, eos),
        add_bos=bool(file.metadata.get("tokenizer.ggml.add_bos_token", bos_default)) and bos is not None,
        generation={},
    )


def _listed(file: GgufFile, name: str, kind: type, default: Any = None) -> list[Any]:
    """The array `tokenizer.ggml.<name>`, as long as the vocabulary. `default` if it is absent."""
    values = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ModelError(
            f"{file.where}: tokenizer.ggml.{name}",
            found="absent" if values is None else type(values).__name__,
            accepted=f"an array of {kind.__name__}",
        )
    count = len(file.metadata["tokenizer.ggml.tokens"]) if name != "merges" else len(values)
    if len(values) != count:
        raise ModelError(
            f"{file.where}: tokenizer.ggml.{name}", found=f"{len(values)} entries", accepted=f"{count}, one a token"
        )
    return values


def _token(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
        raise ModelError(
            f"{file.where}: tokenizer.ggml.{name}_token_id", found=number, accepted=f"0 to {len(tokens) - 1}"
        )
    return number


def _ends(file: GgufFile, tokens: list[str], types: list[int], eos: int | None) -> tuple[int, ...]:
    known = [i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in _ENDS]
    named = [eos, _token(file, "eot", tokens)]
    return tuple(dict.fromkeys(i for i in [*named, *known] if i is not None))


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """(the parts of a tokenizer.json, whether bos is added unless the file says otherwise)."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE:
        raise ModelError(
            f"{file.where}: tokenizer.ggml.pre",
            found=repr(pre),
            accepted=", ".join(_PRE),
            next="convert the model with a current llama.cpp, or use its safetensors form",
        )
    splitting, normalizer, whole = _PRE[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for merge in _listed(file, "merges", str, []) if file.metadata.get("tokenizer.ggml.merges") else []:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"{file.where}: tokenizer.ggml.merges", found=repr(merge), accepted="two tokens whose join is a token"
            )
        merges.append((left, right))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole,
        "vocab": vocab,
        "merges": merges,
    }
    body = {
        "normalizer": normalizer,
        "pre_tokenizer": splitting,
        "model": model,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return body, pre in ("llama-bpe", "llama3", "llama-v3")


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = _listed(file, "scores", float)
    unknown = _token(file, "unknown", tokens)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer = (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]} if prefix else replace
    )
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": BYTE in types,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges_by_score(tokens, types, scores),
    }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "model": model,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges whose order gives SentencePiece's result: best score first, every split of a piece into two pieces.

    SentencePiece joins the neighbours whose joined piece has the best score. Only normal pieces take part; user-defined
    ones are cut out of the text before.
    """
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, UNUSED)}
    order = sorted(
        (i for i, kind in enumerate(types) if kind in (NORMAL, UNUSED) and len(tokens[i]) > 1), key=lambda i: -scores[i]
    )
    merges: list[tuple[str, str]] = []
    for i in order:
        piece = tokens[i]
        for cut in range(len(piece) - 1, 0, -1):
            left = piece[:cut]
            if left in pieces and (right := piece[cut:]) in pieces:
                merges.append((left, right))
    return merges
