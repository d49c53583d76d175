import pytest

from offroad.errors import ModelError
from offroad.text.decoder import read_decoder

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*steps):
    return {"type": "Sequence", "decoders": list(steps)}


def test_byte_level_alphabet():
    decoder = read_decoder({"type": "ByteLevel"})
    assert decoder.piece("Ġthe") == b" the"
    assert decoder.piece("Ċ") == b"\n"
    assert decoder.piece("Ã¶") == "ö".encode()
    assert decoder.piece("漢") == "漢".encode()


def test_fallback_bytes():
    decoder = read_decoder(sequence(REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP))
    assert decoder.piece("<0xff>") == b"\xff"
    assert decoder.piece("<0xfg>") == b"<0xfg>"
    assert decoder.piece("▁a▁") == b" a "
    assert decoder.strip == 1


def test_metaspace_drops_its_mark_in_the_first_token_only():
    decoder = read_decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
    assert decoder.piece("▁a", first=True) == b"a"
    assert decoder.piece("▁a") == b" a"
    never = read_decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"})
    assert never.piece("▁a", first=True) == b" a"


@pytest.mark.parametrize(
    "spec",
    [
        sequence({"type": "Fuse"}, REPLACE),
        sequence(REPLACE, STRIP),
        sequence({"type": "Fuse"}, {**STRIP, "stop": 1}),
        sequence({"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}),
        sequence({"type": "ByteLevel"}, {"type": "Fuse"}),
    ],
)
def test_orders_that_cannot_be_streamed_are_refused(spec):
    with pytest.raises(ModelError, match="decoder"):
        read_decoder(spec)
