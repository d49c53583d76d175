"""Small tokenizers of the two families, built here: nothing is downloaded."""

from __future__ import annotations

import json
from functools import partial

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from offroad.weights.source import TokenizerFiles

TEXT = ["the cat sat on the mat and the hat", "wörld größe 漢字 漢 😀 😀", "hello hello world, the end.\n\n  the"]
SPECIAL = ["<s>", "</s>", "<|user|>"]


def files(json_text: str, **changes) -> TokenizerFiles:
    given = dict(
        tokenizer_json=json_text,
        chat_template=None,
        bos_token="<s>",
        eos_token="</s>",
        eos_ids=(),
        add_bos=False,
        generation={},
    )
    return TokenizerFiles(**{**given, **changes})


def byte_level() -> str:
    """Byte-level BPE with every byte, as of GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("añad", normalized=False)])
    return tokenizer.to_str()


def sentencepiece(strip: bool = True) -> str:
    """BPE with byte fallback and a space mark, as of Llama 2 (`strip`) and Gemma."""
    words = ["▁the", "▁he", "llo", "the", "▁", "▁▁", "o", "h", "e", "l", "t", "w", "r", "d", "ö", "漢", "."]
    vocab = ["<unk>", *SPECIAL, *[f"<0x{b:02X}>" for b in range(256)], *words]
    merges = [("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def metaspace() -> str:
    """BPE whose decoder is Metaspace: the first token loses its space marks."""
    spec = json.loads(sentencepiece(strip=False))
    spec["decoder"] = json.loads(decoders.Metaspace().__getstate__())
    return json.dumps(spec)


KINDS = {
    "byte_level": byte_level,
    "llama": sentencepiece,
    "gemma": partial(sentencepiece, False),
    "metaspace": metaspace,
}
