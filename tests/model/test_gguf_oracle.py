"""The demo models' configs and token ids against transformers reading the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from offroad.weights.gguf_source import GgufSource
from offroad.weights.store import pull

# No run of spaces before a digit: transformers' GGUF path ignores `tokenizer.ggml.pre`, so that it does not cut digits
# off first, as SmolLM2's own tokenizer does ("x  1" has other ids there).
TEXTS = [
    "Hello world",
    "  two spaces",
    " lead",
    "trail ",
    "a   b    c",
    "tabs\t\tx",
    "\n\n\nnew\nlines\n\n",
    "def f(x):\n    return x+1\n        y",
    "12345 6 78",
    "price 3.14 and 1,000",
    "数字 漢字 テスト",
    "مرحبا بالعالم",
    "Ελληνικά",
    "😀😃 emoji 👩‍👩‍👧",
    "Zwölf Boxkämpfer jagen Viktor",
    "naïve café",
    "e\u0301",
    "<b>bold</b> <td>x</td>",
    "it's I'll we'd DON'T",
    "\u00a0nbsp",
    "\u200bzero",
    "a\r\nb",
    "𝔘𝔫𝔦",
    "\x00\x01",
    "<|im_start|>user\nhi<|im_end|>",
    "<bos>x<eos>",
    "<start_of_turn>user\nhi<end_of_turn>",
    "",
    "a",
    " ",
    "      ",
    "https://a.b/c?d=e&f=1",
    "SELECT * FROM t WHERE a=1;",
    "▁literal",
    "0x1F 1e-5",
    "AAAAaaaa",
    "¿Qué?",
    "[multimodal]",
    "ﬁ ligature",
    "हिन्दी",
    "  \n  \n mixed \t ",
    "2024-01-01T00:00:00Z",
]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def path(request) -> Path:
    return pull(request.param)


def test_token_ids_equal_transformers(path):
    from transformers import AutoTokenizer

    ours = tokenizers.Tokenizer.from_str(GgufSource(path).tokenizer().tokenizer_json)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text


def test_config_agrees_with_transformers(path):
    from transformers import AutoConfig

    theirs, ours = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict(), dict(GgufSource(path).config)
    ours.pop("architectures")
    rope = theirs["rope_parameters"]
    if "full_attention" in rope:
        assert rope["sliding_attention"]["rope_theta"] == ours.pop("rope_local_base_freq")
        rope = rope["full_attention"]
    assert rope == {"rope_theta": ours.pop("rope_theta"), "rope_type": "default"}
    assert ours == {name: theirs[name] for name in ours}
