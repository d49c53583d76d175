"""Blocks: references, keys and the order in which free ones are taken."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.cache.checkpoints import Checkpoints
from offroad.cache.pages import Pages
from offroad.cache.slots import Slots


def key(i: int) -> bytes:
    return bytes([i]) * 16


def test_the_bin_is_never_given_out():
    pages, slots = Pages(4), Slots(3)
    assert sorted(pages.take() for _ in range(3)) == [1, 2, 3]
    assert pages.take() == 0
    assert sorted((slots.take(), slots.take())) == [1, 2]
    assert slots.take() == 0


def test_plain_blocks_go_before_cached_ones_and_those_least_recently_freed_first():
    lost: list[bytes] = []
    pages = Pages(5, lost.append)
    blocks = [pages.take() for _ in range(4)]
    for i, block in enumerate(blocks[:3]):
        assert pages.publish(block, key(i)) == block
    for block in (blocks[2], blocks[0], blocks[3], blocks[1]):
        pages.drop(block)
    assert pages.free == 4
    assert [pages.take() for _ in range(4)] == [blocks[3], blocks[2], blocks[0], blocks[1]]
    assert lost == [key(2), key(0), key(1)]
    assert not pages.index


def test_a_hit_takes_a_cached_block_out_of_the_order():
    pages = Pages(3)
    a, b = pages.take(), pages.take()
    pages.publish(a, key(1))
    pages.publish(b, key(2))
    pages.drop(a)
    pages.drop(b)
    pages.hold(a)
    assert pages.take() == b
    assert pages.take() == 0
    pages.drop(a)
    assert pages.index == {key(1): a}
    pages.check({b: 1})


def test_the_first_block_of_a_key_keeps_it():
    pages = Pages(3)
    a, b = pages.take(), pages.take()
    assert pages.publish(a, key(1)) == a
    assert pages.publish(b, key(1)) == a
    pages.drop(b)
    assert pages.plain == [b]


def test_retiring_forgets_a_key_unless_it_is_sticky():
    pages = Pages(3)
    a, b = pages.take(), pages.take()
    pages.publish(a, key(1))
    pages.publish(b, key(2))
    pages.stick(b)
    pages.drop(a, cache=False)
    pages.drop(b, cache=False)
    assert pages.index == {key(2): b}
    pages.forget_free()
    assert not pages.index
    assert pages.take()
    assert pages.take()
    assert not any(pages.sticky)


@given(st.lists(st.tuples(st.sampled_from("take hold drop retire publish stick forget free".split()), st.integers(0, 9)), max_size=80))
def test_books_balance_after_any_operations(moves):
    pages, held = Pages(6), Counter()
    for what, n in moves:
        mine = sorted(held)
        if what == "take":
            block = pages.take()
            assert bool(block) == (len(held) < 5)
            if block:
                assert not held[block]
                held[block] = 1
        elif what == "hold" and (known := sorted(pages.index.values())):
            pages.hold(block := known[n % len(known)])
            held[block] += 1
        elif what in ("drop", "retire") and mine:
            pages.drop(block := mine[n % len(mine)], cache=what == "drop")
            held[block] -= 1
        elif what == "publish" and mine and pages.key_of[mine[n % len(mine)]] is None:
            pages.publish(mine[n % len(mine)], key(n))
        elif what == "stick" and mine:
            pages.stick(mine[n % len(mine)])
        elif what == "forget":
            pages.forget(key(n))
        elif what == "free":
            pages.forget_free()
        held = +held
        pages.check(held)
        assert pages.held == len(held)


def test_many_blocks_cost_no_more_each():
    """A list.remove over 200,000 blocks would take minutes here."""
    pages = Pages(200_000)
    blocks = [pages.take() for _ in range(199_999)]
    for i, block in enumerate(blocks):
        pages.publish(block, i.to_bytes(16, "little"))
    for block in blocks:
        pages.drop(block)
    for block in reversed(blocks):
        pages.hold(block)
        pages.drop(block)
    assert [pages.take() for _ in range(1000)] == blocks[:-1001:-1]


# --- checkpoints --------------------------------------------------------------------------------------------------------


def test_the_oldest_unpinned_checkpoint_gives_way():
    places = Checkpoints(2)
    for i in (1, 2):
        assert places.file(places.ticket(4 * i), key(i))
    first = places.pin(key(1))
    third = places.ticket(12)
    assert third is not None
    assert list(places.index) == [key(1)]
    assert places.ticket(16) is None  # one is pinned, the other a ticket
    places.check([third], [first])
    places.unpin(first)
    assert places.ticket(16, displace=False) is None
    assert places.ticket(16) is not None
    assert not places.index


def test_a_pinned_checkpoint_that_is_forgotten_frees_its_place_after_the_copy():
    places = Checkpoints(1)
    places.file(places.ticket(4), key(1))
    pinned = places.pin(key(1))
    places.forget(key(1))
    assert places.ticket(8) is None
    places.check([], [pinned])
    places.unpin(pinned)
    assert places.ticket(8) is not None


def test_a_second_checkpoint_of_a_key_gives_its_place_back():
    places = Checkpoints(2)
    assert places.file(places.ticket(4, rolling=True), key(1))
    assert not places.file(places.ticket(4), key(1))
    assert len(places.free) == 1
    assert not places.find(key(1)).rolling


def test_no_places_no_tickets():
    assert Checkpoints(0).ticket(4) is None


@pytest.mark.parametrize("wrong", ["refs", "index"])
def test_check_sees_books_that_do_not_balance(wrong):
    pages = Pages(3)
    block = pages.take()
    pages.publish(block, key(1))
    if wrong == "refs":
        pages.refs[block] = 2
    else:
        pages.index[key(2)] = block
    with pytest.raises(AssertionError, match="I1" if wrong == "refs" else "I2"):
        pages.check({block: 1})
