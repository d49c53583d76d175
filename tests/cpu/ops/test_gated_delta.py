"""Gated DeltaNet against plain float64 formulas: chunks, verify rows, batches, dirty slots and rollback."""

from __future__ import annotations

import random
from dataclasses import replace

import delta_cases
import pytest
import torch
from delta_cases import SPEC, Device, Part, Tape, inputs_of, plain, weights_of

from offroad.ops import gated_delta, norm
from offroad.ops.gated_delta import TOLERANCE

WEIGHTS = weights_of(SPEC)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: str = "float32") -> None:
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, atol=limit.absolute, rtol=limit.relative)


@pytest.fixture(autouse=True, params=["rows", "replay"])
def store(request, monkeypatch) -> str:
    """How all devices of a test keep states."""
    monkeypatch.setattr(delta_cases, "STORE", request.param)
    return request.param


@pytest.fixture(scope="module")
def tape() -> Tape:
    return Tape(SPEC, WEIGHTS, 300)


LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 300]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_in_one_chunk(tape: Tape, length: int):
    device = Device(SPEC, WEIGHTS)
    [out] = device.step([tape.part(2, 0, length)])
    close(out, tape.out[:length])
    close(device.state_at(2, length), tape.states[length - 1])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 70])
def test_a_prompt_token_by_token(tape: Tape, length: int):
    device = Device(SPEC, WEIGHTS)
    out = [device.step(verify=[tape.part(1, t, t + 1)])[0] for t in range(length)]
    close(torch.cat(out), tape.out[:length])
    close(device.state_at(1, length), tape.states[length - 1])


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_cut_anywhere(tape: Tape, k: int):
    """In two at every place, in three with one token in the middle, and in chunks of one token."""
    total = 9
    cuts = [[a] for a in range(1, total)] + [[a, a + 1] for a in range(1, total - 1)] + [list(range(1, total))]
    for cut in cuts:
        device, bounds = Device(SPEC, WEIGHTS, k=k), [0, *cut, total]
        parts = [tape.part(3, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        close(torch.cat([device.step([part])[0] for part in parts]), tape.out[:total])
        close(device.state_at(3, total), tape.states[total - 1])


def test_uneven_chunks_of_a_long_prompt_then_tokens(tape: Tape):
    device, bounds = Device(SPEC, WEIGHTS), [0, 37, 100, 128, 129, 131, 260]
    out = [device.step([tape.part(0, a, b)])[0] for a, b in zip(bounds, bounds[1:], strict=False)]
    out += [device.step(verify=[tape.part(0, t, t + 1)])[0] for t in range(260, 300)]
    close(torch.cat(out), tape.out)


@pytest.mark.parametrize("k", [0, 2])
def test_rows_of_a_mixed_batch_do_not_see_each_other(k: int):
    """Verify rows and chunks of sequences of unlike lengths, in every step in another order of slots."""
    dice, slots = random.Random(3), [1, 2, 3, 4, 5]
    tapes = {slot: Tape(SPEC, WEIGHTS, 40, seed=slot) for slot in slots}
    device, done = Device(SPEC, WEIGHTS, slots=7, k=k), dict.fromkeys(slots, 0)
    outs: dict[int, list[torch.Tensor]] = {slot: [] for slot in slots}
    while any(done[slot] < 40 for slot in slots):
        live = [slot for slot in slots if done[slot] < 40]
        dice.shuffle(live)
        cut = dice.randrange(len(live) + 1)
        ends = {slot: min(40, done[slot] + (1 if i < cut else dice.randint(1, 9))) for i, slot in enumerate(live)}
        parts = [tapes[slot].part(slot, done[slot], ends[slot]) for slot in live]
        for slot, out in zip(live, device.step(parts[cut:], parts[:cut]), strict=True):
            outs[slot].append(out)
        done |= ends
    for slot in slots:
        close(torch.cat(outs[slot]), tapes[slot].out)
        close(device.state_at(slot, 40), tapes[slot].states[-1])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("first", [1, 2, 3, 6])
def test_a_new_sequence_does_not_see_what_its_slot_held(tape: Tape, first: int, k: int):
    """Slots begin full of NaN here; after another sequence has ended they hold plausible numbers."""
    device = Device(SPEC, WEIGHTS, k=k)
    device.step([Part(1, 0, *inputs_of(SPEC, 21, seed=9))])
    out = [device.step([tape.part(1, 0, first)])[0]]
    out += [device.step(verify=[tape.part(1, t, t + 1)])[0] for t in range(first, 10)]
    close(torch.cat(out), tape.out[:10])
    # A verify row may begin a sequence too.
    device.step([Part(2, 0, *inputs_of(SPEC, 21, seed=9))])
    close(device.step(verify=[tape.part(2, 0, k + 1)])[0], tape.out[: k + 1])


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 3), (2, 2), (4, 12), (3, 6)])
def test_gates_and_head_counts(gate: str, key_heads: int, value_heads: int):
    spec = replace(SPEC, key_heads=key_heads, value_heads=value_heads, gate=gate)
    weights = weights_of(spec, seed=5)
    tape, device = Tape(spec, weights, 30), Device(spec, weights)
    out = [*device.step([tape.part(0, 0, 20)]), *device.step(verify=[tape.part(0, 20, 21)])]
    close(torch.cat(out), tape.out[:21])


@pytest.mark.parametrize("kernel", [2, 3])
def test_other_widths_of_the_convolution(kernel: int):
    spec = replace(SPEC, kernel=kernel, key_dim=6, value_dim=10)
    weights = weights_of(spec, seed=6)
    tape, device = Tape(spec, weights, 12), Device(spec, weights)
    out = [*device.step([tape.part(0, 0, 1)]), *device.step([tape.part(0, 1, 9)])]
    out += [device.step(verify=[tape.part(0, t, t + 1)])[0] for t in range(9, 12)]
    close(torch.cat(out), tape.out)


def test_queries_and_keys_near_zero():
    """So short that the epsilon under their square roots counts: they are not blown up to unit length."""
    qkvz, ba = inputs_of(SPEC, 40, seed=2)
    qkvz[:, : 2 * SPEC.key_heads * SPEC.key_dim] *= 1e-3
    expected = torch.from_numpy(plain(SPEC, WEIGHTS, qkvz, ba)[1])
    device = Device(SPEC, WEIGHTS)
    device.step([Part(0, 0, qkvz[:30], ba[:30])])
    close(device.state_at(0, 30), expected[29])
    device.step(verify=[Part(0, 30, qkvz[30:31], ba[30:31])])
    close(device.state_at(0, 31), expected[30])


def test_strong_decay_neither_overflows_nor_loses_the_last_tokens():
    """Decays down to e^-30 a token: over a chunk their product is far below what fp32 can hold."""
    weights = weights_of(SPEC, seed=7, a_log=2.0, dt_bias=1.0)
    weights.a_log[:3], weights.dt_bias[:3] = 2.0, 1.0
    qkvz, ba = inputs_of(SPEC, 200, seed=8)
    ba[::3, SPEC.value_heads :] += 3.0
    expected, states = (torch.from_numpy(a) for a in plain(SPEC, weights, qkvz, ba))
    device = Device(SPEC, weights)
    [out] = device.step([Part(0, 0, qkvz, ba)])
    close(out, expected)
    close(device.state_at(0, 200), states[-1])
    out = [device.step(verify=[Part(1, t, qkvz[t : t + 1], ba[t : t + 1])])[0] for t in range(200)]
    close(torch.cat(out), expected)


def test_no_decay_keeps_what_was_learnt(tape: Tape):
    weights = weights_of(SPEC, seed=7)
    weights.a_log[:] = -30.0
    tape, device = Tape(SPEC, weights, 150), Device(SPEC, weights)
    close(device.step([tape.part(0, 0, 150)])[0], tape.out)


def test_float64_is_computed_in_float64(tape: Tape):
    """The formulas' own numbers but for float64's rounding, where fp32 is as far from them as fp32 rounds."""

    def run(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        device = Device(SPEC, WEIGHTS, k=1, dtype=dtype, stored=dtype, lag=4)
        out = [*device.step([tape.part(2, 0, 200)]), *device.step([tape.part(2, 200, 203)])]
        out += [device.step(verify=[tape.part(2, t, t + 2)])[0] for t in range(203, 223, 2)]
        return torch.cat(out), device.state_at(2, 223)

    expected = tape.out[:223], tape.states[222]
    for wide, narrow, exact in zip(run(torch.float64), run(torch.float32), expected, strict=True):
        assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
        assert (wide - exact).abs().max() < 1e-12
        assert (narrow - exact).abs().max() > 1e-8
        close(narrow, wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_and_halves_are_computed_in_fp32(tape: Tape, monkeypatch, dtype: torch.dtype):
    """With plain conversions to fp32 in place of widening, the bits are the same."""

    def run() -> list[torch.Tensor]:
        device = Device(SPEC, WEIGHTS, k=1, dtype=dtype, lag=4)
        out = device.step([tape.part(2, 0, 70)])
        out += [device.step(verify=[tape.part(2, t, t + 2)])[0] for t in range(70, 82, 2)]
        return [*out, device.state_at(2, 82)]

    found = run()
    for module in (gated_delta, norm):
        monkeypatch.setattr(module, "widened", torch.Tensor.float)
    for ours, plainly in zip(found, run(), strict=True):
        assert ours.dtype == plainly.dtype
        assert torch.equal(ours, plainly)
    assert (found[0].dtype, found[-1].dtype) == (dtype, torch.float32)


def test_bfloat16_activations(tape: Tape):
    qkvz, ba = tape.qkvz.bfloat16(), tape.ba.bfloat16()
    expected = torch.from_numpy(plain(SPEC, WEIGHTS, qkvz.float(), ba.float())[0])
    device = Device(SPEC, WEIGHTS, dtype=torch.bfloat16)
    out = [*device.step([Part(0, 0, qkvz[:90], ba[:90])])]
    out += [device.step(verify=[Part(0, t, qkvz[t : t + 1], ba[t : t + 1])])[0] for t in range(90, 100)]
    found = torch.cat(out)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected[:100]).abs()
    assert error.mean() < TOLERANCE["bfloat16"].absolute / 3
    assert device.state_at(0, 100).dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_state_stored_in_half_is_off_by_a_bounded_error(tape: Tape, stored: torch.dtype):
    """The error of each store is forgotten by decay: the last hundred tokens are no worse than the first."""
    device = Device(SPEC, WEIGHTS, stored=stored)
    found = torch.cat([device.step(verify=[tape.part(0, t, t + 1)])[0] for t in range(300)])
    error = (found - tape.out).abs()
    scale = tape.out.abs().mean()
    limit = 0.01 if stored is torch.bfloat16 else 0.0012
    assert 1e-6 * scale < error.mean() < limit * scale
    assert error[200:].mean() < 2 * error[:100].mean()


class Rollback:
    """Sequences that speculate: each round runs true tokens followed by wrong ones, and keeps the true ones."""

    def __init__(self, k: int = 3, spoil: bool = False) -> None:
        self.slots, self.k, self.spoil = [1, 2, 3, 5], k, spoil
        self.device = Device(SPEC, WEIGHTS, slots=6, k=k)
        self.tapes = {slot: Tape(SPEC, WEIGHTS, 60, seed=20 + slot) for slot in self.slots}
        self.worst = 0.0
        prompts = {slot: 1 + 4 * i for i, slot in enumerate(self.slots)}
        out = self.device.step([self.tapes[slot].part(slot, 0, end) for slot, end in prompts.items()])
        self.length = prompts
        for slot, found in zip(self.slots, out, strict=True):
            self.compare(found, slot, 0)

    def compare(self, found: torch.Tensor, slot: int, start: int) -> None:
        self.worst = max(self.worst, float((found - self.tapes[slot].out[start : start + len(found)]).abs().max()))

    def verify_part(self, slot: int, width: int, valid: int) -> Part:
        start = self.length[slot]
        true = self.tapes[slot].part(slot, start, start + valid)
        qkvz, ba = inputs_of(SPEC, width - valid, seed=1000 + start)
        return Part(slot, start, torch.cat((true.qkvz, qkvz)), torch.cat((true.ba, ba)))

    def round(self, plan: dict[int, tuple[int, int]], chunk: Part | None = None) -> None:
        """`plan` has (width, how many of its tokens are valid) by slot, in the order of rows."""
        parts = [self.verify_part(slot, *row) for slot, row in plan.items()]
        out = self.device.step([chunk] if chunk else [], parts)
        for (slot, (width, valid)), found in zip(plan.items(), out, strict=False):
            self.compare(found[:valid], slot, self.length[slot])
            self.length[slot] += valid
            if self.spoil:  # as if the state had not been rolled back
                end = self.length[slot] - valid + width
                self.device.state.put(slot, self.length[slot], self.device.state_at(slot, end).clone()[None])


def test_rejected_drafts_leave_no_trace():
    """Every width and every number of accepted tokens after each other, rows of unlike widths in one step."""
    rollback = Rollback()
    cases = [(width, valid) for width in range(1, 5) for valid in range(1, width + 1)]
    for i in range(len(cases)):
        plan = {slot: cases[(i + 3 * j) % len(cases)] for j, slot in enumerate(rollback.slots)}
        rollback.round(plan)
    assert rollback.worst < 5e-5
    for slot, length in rollback.length.items():
        close(rollback.device.state_at(slot, length), rollback.tapes[slot].states[length - 1])


def test_random_rounds_with_chunks_beside_them():
    dice, rollback = random.Random(4), Rollback()
    for number in range(12):
        order = dice.sample(rollback.slots, dice.randint(1, 4))
        plan = {slot: (width := dice.randint(1, 4), dice.randint(1, width)) for slot in order}
        chunk = Part(4, 7 * number, *inputs_of(SPEC, 7, seed=number))
        rollback.round(plan, chunk)
    assert rollback.worst < 5e-5


@pytest.mark.parametrize("k", [1, 2, 5])
def test_rings_for_other_numbers_of_drafts(k: int):
    rollback = Rollback(k)
    for valid in [1, k + 1, 1, 2, 1]:
        rollback.round({slot: (k + 1, valid) for slot in rollback.slots})
    assert rollback.worst < 5e-5


def test_the_tests_of_rollback_are_not_blind():
    rollback = Rollback(spoil=True)
    for _ in range(3):
        rollback.round(dict.fromkeys(rollback.slots, (4, 2)))
    assert rollback.worst > 0.1
