"""Keys of prefixes: what they depend on, and that extending them redoes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.cache.prefix import KEY_BYTES, extend_keys, root_key


def keys(tokens, block=4, root=None, count=None):
    found: list[bytes] = []
    extend_keys(found, root or root_key("m"), tokens, len(tokens) // block if count is None else count, block)
    return found


def test_a_key_depends_on_all_tokens_up_to_its_block_and_on_no_later_one():
    base = keys(range(12))
    assert len(base) == 3
    assert len(set(base)) == 3
    assert keys([*range(12), 5, 6]) == base
    for changed in range(12):
        tokens = list(range(12))
        tokens[changed] = 99
        other = keys(tokens)
        assert other[: changed // 4] == base[: changed // 4]
        assert not set(other[changed // 4 :]) & set(base)


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 7), st.integers(0, 40))
def test_extending_in_two_parts_gives_the_same_keys(tokens, block, cut):
    whole = keys(tokens, block)
    parts = keys(tokens, block, count=min(cut, len(tokens) // block))
    before = list(parts)
    extend_keys(parts, root_key("m"), tokens, len(tokens) // block, block)
    assert parts == whole
    assert parts[: len(before)] == before


def test_keys_that_are_there_are_not_computed_again():
    known = [b"a" * KEY_BYTES, b"b" * KEY_BYTES]
    extend_keys(known, root_key("m"), range(12), 3, 4)
    assert known[:2] == [b"a" * KEY_BYTES, b"b" * KEY_BYTES]
    assert len(known) == 3
    extend_keys(known, root_key("m"), range(12), 1, 4)
    assert len(known) == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("m", ""), ("n", "")), (("m", "x"), ("m", "")), (("m", "x"), ("m", "y")), (("mx", ""), ("m", "x")),
        (("x", "m"), ("m", "x")), (("m4:salt=1:x", ""), ("m", "x")),
    ],
)
def test_namespace_and_salt_are_tagged(a, b):
    assert root_key(*a) != root_key(*b)
    assert keys(range(8), root=root_key(*a))[0] != keys(range(8), root=root_key(*b))[0]


def test_a_namespace_may_be_bytes_or_text():
    assert root_key(b"model") == root_key("model")
    assert len(root_key("model")) == KEY_BYTES
