"""Hopper's attention of few queries, emulated, beside the reference: heads, kinds of rows, windows, widths; the same
bits by any blocks, in any order, alone or among others, as one token or several; and what must not lack is missed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sm70_emulated import needs_compiler

pytest.importorskip("triton")  # whose partitions the kernel has
sys.path.append(str(Path(__file__).parents[1] / "triton_kernels"))
import attention_cases  # noqa: E402
from attention_cases import Case, make, rows_of, tolerance  # noqa: E402
from hopper_attention_emulated import Emulated, Fault  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.nvrtc import attention_few  # noqa: E402
from offroad.ops.attention import attention  # noqa: E402
from offroad.ops.spec import Load, Problem  # noqa: E402
from offroad.triton_kernels import attention as paged  # noqa: E402

pytestmark = needs_compiler
BF16, E5M2, E4M3 = torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    return Emulated(monkeypatch)


def made(case: Case) -> tuple:
    """(q, view, rows, spec, expected): the reference has stored the step's rows."""
    q, k, v, view, rows, spec = make(case)
    expected = attention(q, k, v, view, rows, spec)
    return q, view, rows, spec, expected


def case_of(starts: tuple[int, ...], widths: tuple[int, ...], *sizes: int, **more) -> Case:
    return Case(starts, widths, *sizes, dtype=BF16, **({"kv": BF16} | more))


def check(emulated: Emulated, case: Case, **how: int) -> None:
    q, view, rows, spec, expected = made(case)
    found = emulated(q, view, rows, spec, **how)
    torch.testing.assert_close(found.float(), expected.float(), **tolerance(case))


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 1, 64), (2, 4, 128), (1, 6, 256), (1, 8, 512), (1, 9, 128)])
@pytest.mark.parametrize("kv", [BF16, E5M2, E4M3])
def test_heads_and_kinds_of_rows(emulated: Emulated, kv: torch.dtype, kv_heads: int, group: int, dim: int):
    if kv.itemsize == 1 and dim == 64:
        pytest.skip("a row of 64 bytes is for Triton's kernel")
    check(emulated, case_of((0, 61, 300), (1, 1, 1), kv_heads, group, dim, kv=kv, scaled=kv != BF16))


@pytest.mark.parametrize(
    ("window", "softcap", "pages_only"), [(200, None, False), (40, 30.0, False), (300, None, True), (None, 20.0, True)]
)
def test_windows_softcaps_and_rows_of_several_tokens(emulated: Emulated, window, softcap, pages_only):
    case = case_of((500, 0, 61), (3, 1, 8), 1, 3, 128, window=window, softcap=softcap, pages_only=pages_only)
    check(emulated, case, blocks=2, seed=1)


@pytest.mark.parametrize("block", [16, 32, 128])
def test_blocks_smaller_and_larger_than_a_step(emulated: Emulated, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_cases, "BLOCK", block)
    check(emulated, case_of((700, 15), (1, 2), 1, 4, 128, kv=E5M2), blocks=2, seed=2)


def test_partitions_that_grow_and_more_of_them_than_are_asked_for_at_once(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(paged, "EACH", 8)
    check(emulated, case_of((5000, 130), (2, 1), 1, 2, 64), blocks=2, seed=3)


def test_an_item_of_more_blocks_than_a_warp_holds(emulated: Emulated, monkeypatch: pytest.MonkeyPatch):
    """Partitions of 512 tokens in blocks of 16, with another item behind each."""
    monkeypatch.setattr(paged, "EACH", 8)
    monkeypatch.setattr(attention_cases, "BLOCK", 16)
    check(emulated, case_of((5000, 130), (1, 1), 1, 2, 64), blocks=1, seed=4)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_no_more_memory_is_asked_for_than_planned(emulated: Emulated, width: int, monkeypatch: pytest.MonkeyPatch):
    """Of rows as wide as planned, and of narrower ones, of which more fit what a card has for them."""
    monkeypatch.setattr(paged, "WORKSPACE", 1)
    load = Load(rows=10, tokens=50, width=5, length=900 + 64)  # the case's tables have a column more
    sizes = (("block", 64), ("head_dim", 64), ("heads", 6), ("kv_heads", 2))
    problem = Problem("attention", "decode", "bfloat16", "bfloat16", sizes, load=load)
    row = attention_few.sums_bytes(6, 2, 64, 5, paged.partitions(0, paged.longest(load, 64), 5)[1])
    card = replace(load_profile("h200-141gb"), memory=256 * (row * 5 // 2))
    planned = attention_few.partials(card, problem)
    q, view, rows, spec, _ = made(case_of((895,) * 10, (width,) * 10, 2, 3, 64))
    emulated(q, view, rows, spec, most=paged.room(card.memory))
    assert row < emulated.memory.most[q.device] <= planned


@pytest.mark.parametrize(
    ("rows", "window", "columns", "ours"),
    [(1, None, 4, False), (12, None, 4, True), (1, None, 1024, True), (1, 128, 1024, False), (12, 128, 4, True)],
)
def test_which_rows_go_to_the_other_kernel(rows: int, window: int | None, columns: int, ours: bool, monkeypatch):
    """Few ones, unless tables are for long histories; of two KV heads. Those of this step are stored first."""
    q, k, v, view, step, spec = make(case_of((70,) * rows, (1,) * rows, 2, 1, 64, window=window))
    view = replace(view, table=torch.zeros((rows + 1, columns), dtype=torch.int32))
    calls = []
    monkeypatch.setattr(paged, "store", lambda *_: calls.append("store"))
    monkeypatch.setattr(attention_few, "attend", lambda *_: calls.append("attend"))
    attention_few.attention(q, k, v, view, step, spec, other=lambda *_: calls.append("other"), most=1)
    assert calls == (["store", "attend"] if ours else ["other"])


def test_more_rows_than_a_launch_takes(emulated: Emulated, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_few, "MOST_ROWS", 2)
    check(emulated, case_of((200, 0, 300), (1, 1, 1), 1, 2, 64), blocks=2)


def test_the_same_bits_by_any_blocks_in_any_order(emulated: Emulated):
    q, view, rows, spec, _ = made(case_of((400, 61, 150), (2, 1, 1), 2, 3, 128))
    found = [emulated(q, view, rows, spec, blocks=blocks, seed=seed) for blocks, seed in ((1, 0), (2, 5), (5, 9))]
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_a_row_alone_gives_the_bits_that_it_gives_among_others(emulated: Emulated):
    q, view, rows, spec, _ = made(case_of((400, 61, 130), (1, 4, 2), 1, 6, 256, window=300))
    together = emulated(q, view, rows, spec)
    for row in range(3):
        one, span = slice(row, row + 1), slice(int(rows.offset[row]), int(rows.offset[row] + rows.width[row]))
        alone = rows_of(rows.start[one], rows.width[one], rows.slot[one], "cpu")
        assert torch.equal(emulated(q[span], view, alone, spec), together[span])


@pytest.mark.parametrize("window", [None, 150])
def test_a_row_of_several_tokens_gives_the_bits_of_single_ones(emulated: Emulated, window: int | None):
    """Beyond a boundary of partitions, and with another first one where there is a window."""
    q, view, rows, spec, _ = made(case_of((276,), (8,), 1, 3, 64, window=window))
    together = emulated(q, view, rows, spec)
    for token in (0, 2, 4, 7):
        one = slice(token, token + 1)
        part = rows_of(np.array([276 + token]), np.array([1]), rows.slot, "cpu")
        assert torch.equal(emulated(q[one], view, part, spec), together[one])


def test_rows_that_sit_out_leave_the_others_bits(emulated: Emulated):
    q, view, rows, spec, _ = made(case_of((300, 40), (1, 1), 1, 2, 64))
    wanted = emulated(q, view, rows, spec)
    start, width, slot = ([*of[:1], 0, *of[1:]] for of in (rows.start, rows.width, rows.slot))
    with_none = rows_of(np.array(start), np.array(width), np.array(slot), "cpu")
    assert torch.equal(emulated(q, view, with_none, spec), wanted)


# Parts of the kernel, and what stands for them.
MISSED = {
    "queries before their turn": ("    wait_turn();\n", ""),
    "sums before all are kept": ("    meet(p);\n", ""),
    "what lies behind a row": (
        "        if (at < item.low || at + KEYS > item.stop) clear_outside(slot, item, at);\n",
        "",
    ),
    "queries that have not come": ("        wait_for_words();\n", ""),
    "keys that a query does not see": ("behind < 0 ||", ""),
    "larger scores than before": ("sums[t].acc[i / 4][i % 4] *= shrink[i % 2]", ""),
}


@pytest.mark.parametrize("change", MISSED.values(), ids=MISSED)
def test_what_must_not_lack_is_missed(emulated: Emulated, change: tuple[str, str]):
    """Warps have more than one item, and some of those are short: copies are some items ahead."""
    starts = (300, 61, 20, 150, 9, 33, 5, 2, 7, 8, 9, 100, 11, 12, 40, 50)
    q, view, rows, spec, expected = made(case_of(starts, (2, *[1] * 15), 2, 3, 128))
    wrong = 0
    for seed in range(4):
        try:
            found = emulated(q, view, rows, spec, blocks=1 + seed, seed=seed, changes=(change,))
        except Fault:
            wrong += 1
        else:
            wrong += not torch.allclose(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert wrong
