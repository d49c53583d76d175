import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, byte_level, files

from offroad.sample.params import SamplingParams
from offroad.text.detokenize import OutputStream
from offroad.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return Tokenizer(files(KINDS[request.param]()))


def chunks(data, ids):
    out = []
    while ids:
        n = data.draw(st.integers(1, len(ids)))
        out.append(ids[:n])
        ids = ids[n:]
    return out


def run(stream, parts):
    deltas = [stream.push(p) for p in parts] + [stream.finish()]
    return "".join(d.text for d in deltas), deltas


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_the_whole_decode(tokenizer, data):
    # Bytes outnumber other tokens, so that characters are often cut and often invalid.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    skip, continues = data.draw(st.booleans()), data.draw(st.booleans())
    params = SamplingParams(skip_special_tokens=skip, stop=("\x00never\x00",))
    stream = OutputStream(tokenizer, params, continues=continues)
    text, deltas = run(stream, chunks(data, ids))
    assert text == tokenizer.decode(ids, skip_special=skip, continues=continues)
    assert stream.tokens_used == len(ids)
    assert not any(d.stopped for d in deltas)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_do_not_depend_on_the_chunks(tokenizer, data):
    wanted = (b"t", b"h", b"e", b"the", b" the")
    letters = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in wanted]
    ids = data.draw(st.lists(st.sampled_from(letters), max_size=20))
    stops = tuple(data.draw(st.lists(st.text("the", min_size=1, max_size=4), min_size=1, max_size=3)))
    include = data.draw(st.booleans())
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    stream = OutputStream(tokenizer, params)
    text, deltas = run(stream, chunks(data, ids))

    whole = tokenizer.decode(ids)
    # The reference: the first character at which some stop string is complete; of several, the longest.
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stops if s in whole]
    if not ends:
        assert text == whole
        assert not deltas[-1].stopped
        return
    end, _, stop = min(ends)
    assert text == whole[: end if include else end - len(stop)]
    assert deltas[-1].stopped
    assert deltas[-1].stop_reason == stop
    needed = next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= end)
    assert stream.tokens_used == needed


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer(files(byte_level()))


def test_an_incomplete_character_waits(bpe):
    ids = [next(i for i in range(bpe.vocab_size) if bpe.token_bytes(i) == bytes([b])) for b in "é😀".encode()]
    stream = OutputStream(bpe, SamplingParams())
    assert [stream.push([i]).text for i in ids] == ["", "é", "", "", "", "😀"]
    assert stream.push(ids[:1]).text == ""
    assert stream.finish().text == "\ufffd"


def test_a_partial_stop_string_is_held_and_released(bpe):
    stream = OutputStream(bpe, SamplingParams(stop=("cats",)))
    assert stream.push(bpe.encode("the cat")).text == "the "
    assert stream.push(bpe.encode(" sat")).text == "cat sat"
    assert stream.push(bpe.encode("ca")).text == ""
    assert stream.finish().text == "ca"


def test_nothing_follows_a_stop(bpe):
    stream = OutputStream(bpe, SamplingParams(stop=("cat",)))
    delta = stream.push(bpe.encode("the cat sat"))
    assert (delta.text, delta.stopped, delta.stop_reason) == ("the ", True, "cat")
    assert (stream.push(bpe.encode("on")).text, stream.finish().text, stream.finish().stopped) == ("", "", True)


def test_the_finishing_token_has_no_text_unless_asked_for(bpe):
    tool = bpe.token_id("<tool>")
    ids = [*bpe.encode("cat"), tool]
    stream = OutputStream(bpe, SamplingParams(stop_token_ids=(tool,)))
    assert stream.push(ids, ends_with_stop_token=True).text == "cat"
    assert stream.tokens_used == len(ids)
    stream = OutputStream(bpe, SamplingParams(stop_token_ids=(tool,), include_stop_str_in_output=True))
    assert stream.push(ids, ends_with_stop_token=True).text == "cat<tool>"


def test_stop_strings_within_min_tokens_do_not_count(bpe):
    ids = bpe.encode("cat cat")
    first = len(bpe.encode("cat"))
    stream = OutputStream(bpe, SamplingParams(stop=("cat",), min_tokens=first, max_tokens=100))
    delta = stream.push(ids)
    assert delta.stopped
    assert delta.text == "cat "
