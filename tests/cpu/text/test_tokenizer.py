import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, byte_level, files, sentencepiece

from offroad.errors import ModelError
from offroad.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    text = KINDS[request.param]()
    return Tokenizer(files(text)), tokenizers.Tokenizer.from_str(text)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_text_survives_the_round_trip(kind):
    ours = Tokenizer(files(KINDS[kind]()))
    for text in ["the hello", "hello wörld 漢字 😀.\n", "a\x00b"]:
        assert ours.decode(ours.encode(text)) == text


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_decode_agrees_with_the_library_where_bytes_are_valid(pair, data):
    ours, library = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    text = ours.decode(ids, skip_special=skip)
    if "\ufffd" not in text:
        assert text == library.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_are_exact():
    ours = Tokenizer(files(byte_level()))
    for text in ["größe 漢字 😀", "a b"]:
        assert b"".join(ours.token_bytes(i) for i in ours.encode(text)) == text.encode()
    assert {ours.token_bytes(i) for i in range(ours.vocab_size)} >= {bytes([b]) for b in range(256)}
    llama = Tokenizer(files(sentencepiece()))
    assert llama.token_bytes(llama.token_id("<0xE6>")) == b"\xe6"
    assert llama.token_bytes(llama.token_id("▁the")) == b" the"
    assert llama.token_text(llama.token_id("▁the")) == "▁the"


def test_invalid_bytes_become_one_replacement_per_invalid_part():
    ours = Tokenizer(files(sentencepiece()))
    ids = [ours.token_id(t) for t in ("<0xE6>", "<0xBC>", "<0xA2>", "<0xE6>", "<0xBC>", "h")]
    assert ours.decode(ids) == "漢\ufffdh"


def test_a_continued_text_keeps_its_leading_space():
    ours = Tokenizer(files(sentencepiece()))
    ids = [ours.token_id("▁the")]
    assert ours.decode(ids) == "the"
    assert ours.decode(ids, continues=True) == " the"


def test_ids_without_a_token_have_no_text():
    ours = Tokenizer(files(byte_level()))
    ids = ours.encode("cat")
    assert ours.decode([ours.vocab_size + 5, *ids]) == "cat"
    assert ours.token_bytes(ours.vocab_size + 5) == b""


@pytest.mark.parametrize("text", ["the", "<s>the"])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_bos_comes_once(kind, text):
    ours = Tokenizer(files(kind(), add_bos=True))
    ids = ours.encode(text)
    assert ids[0] == ours.bos_id
    assert ids.count(ours.bos_id) == 1


def test_no_bos_without_special():
    ours = Tokenizer(files(sentencepiece(), add_bos=True))
    assert ours.bos_id not in ours.encode("the", add_special=False)


def test_special_tokens_are_skipped_on_request():
    ours = Tokenizer(files(byte_level()))
    ids = ours.encode("<|user|>cat<tool>")
    assert ours.decode(ids) == "cat<tool>"
    assert ours.decode(ids, skip_special=False) == "<|user|>cat<tool>"


def test_eos_ids():
    text = byte_level()
    assert Tokenizer(files(text)).eos_ids == (1,)
    assert Tokenizer(files(text, eos_ids=(1, 2))).eos_ids == (1, 2)
    assert Tokenizer(files(text, eos_ids=(5, 2))).eos_ids == (5, 2, 1)
    assert Tokenizer(files(text, eos_ids=(5, 5), eos_token=None)).eos_ids == (5,)


def test_truncation_and_padding_of_the_file_do_not_apply():
    tokenizer = tokenizers.Tokenizer.from_str(byte_level())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    assert Tokenizer(files(tokenizer.to_str())).decode(Tokenizer(files(byte_level())).encode("the cat")) == "the cat"
    assert len(Tokenizer(files(tokenizer.to_str())).encode("cat sat on")) == len(
        Tokenizer(files(byte_level())).encode("cat sat on")
    )


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(files("{"))
    with pytest.raises(ModelError, match="bos_token is not in the vocabulary"):
        Tokenizer(files(byte_level(), bos_token="<nope>"))
    with pytest.raises(ModelError, match="names none"):
        Tokenizer(files(byte_level(), bos_token=None, add_bos=True))


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_an_unknown_decoder_is_named(decoder):
    spec = json.loads(byte_level())
    spec["decoder"] = decoder
    with pytest.raises(ModelError, match="WordPiece" if decoder else "none"):
        Tokenizer(files(json.dumps(spec)))
