"""States that are replayed from records are those that rows keep: every width and every number of accepted tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_cases import SPEC, Device, Part, Tape, inputs_of, weights_of

K = 3
CASES = [(width, valid) for width in range(1, K + 2) for valid in range(1, width + 1)]


class Pair:
    """Sequences that run alike on a device with rows and on one that replays, a case of CASES each."""

    def __init__(self, k: int = K, spec=SPEC, lag: int = 0) -> None:
        weights = weights_of(spec)
        self.slots = list(range(len(CASES)))
        self.devices = [Device(spec, weights, len(CASES) + 2, k, store=store, lag=lag) for store in ("rows", "replay")]
        self.tapes = [Tape(spec, weights, 60, seed=30 + slot) for slot in self.slots]
        self.length = dict.fromkeys(self.slots, 0)
        self.spec, self.round_number = spec, 0

    def prompts(self, ends: dict[int, int]) -> None:
        for device in self.devices:
            device.step([self.tapes[slot].part(slot, self.length[slot], end) for slot, end in ends.items()])
        self.length |= ends
        self.compare({slot: [end] for slot, end in ends.items()})

    def round(self, cases: dict[int, tuple[int, int]]) -> None:
        """A verify step with the (width, valid) of each slot; the tokens behind the valid ones are wrong."""
        self.round_number += 1
        parts = []
        for slot, (width, valid) in cases.items():
            start = self.length[slot]
            true = self.tapes[slot].part(slot, start, start + valid)
            qkvz, ba = inputs_of(self.spec, width - valid, seed=100 * self.round_number + slot)
            parts.append(Part(slot, start, torch.cat((true.qkvz, qkvz)), torch.cat((true.ba, ba))))
        outs = [torch.cat(device.step(verify=parts)) for device in self.devices]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
        passed = {
            slot: range(self.length[slot] + 1, self.length[slot] + valid + 1) for slot, (_, valid) in cases.items()
        }
        self.compare(passed)
        self.length |= {slot: boundaries[-1] for slot, boundaries in passed.items()}

    def compare(self, boundaries: dict[int, range | list[int]]) -> None:
        """Both can produce the state at each boundary that a slot has passed, and it is right."""
        for slot, passed in boundaries.items():
            for boundary in passed:
                rows, replay = (device.state_at(slot, boundary) for device in self.devices)
                assert rows.isfinite().all()
                torch.testing.assert_close(replay, rows, atol=1e-5, rtol=1e-5)
                truth = self.tapes[slot].states[boundary - 1].float()
                torch.testing.assert_close(replay, truth, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("lag", [0, 8])
@pytest.mark.parametrize("shift", range(len(CASES)))
def test_every_case_after_every_other(shift: int, lag: int):
    """Two drafted rounds, one without drafts, and two again; a sequence each case, and one without a prompt."""
    pair = Pair(lag=lag)
    pair.prompts({slot: 1 + slot for slot in pair.slots[1:]})
    for number in (0, shift, None, 2 * shift + 1, 3 * shift):
        order = sorted(pair.slots, key=lambda slot: slot * 7 % 10)  # rows are in another order than slots
        pair.round({s: (1, 1) if number is None else CASES[(s + number) % len(CASES)] for s in order})


def test_a_state_taken_in_the_middle_of_a_step_goes_on_elsewhere():
    """Every boundary that a step has passed is copied to another slot, which held another sequence, and goes on."""
    pair = Pair()
    pair.prompts(dict.fromkeys(pair.slots[:3], 5))
    pair.round({0: (4, 4), 1: (4, 3), 2: (2, 1)})
    for slot in (0, 1, 2):
        for boundary in range(6, pair.length[slot] + 1):
            for device in pair.devices:
                other = len(CASES)
                device.step(verify=[Part(other, 0, *inputs_of(SPEC, 4, seed=7))])
                device.state.put(other, boundary, device.state.before(slot, boundary, 1))
                at = torch.arange(boundary - 3, boundary) % device.conv.capacity
                device.conv.data[other, at] = pair.tapes[slot].qkvz[boundary - 3 : boundary, : SPEC.channels]
                tape = pair.tapes[slot]
                for start, end in ((boundary, boundary + 2), (boundary + 2, boundary + 3)):
                    [out] = device.step(verify=[tape.part(other, start, end)])
                    torch.testing.assert_close(out.double(), tape.out[start:end], atol=5e-5, rtol=2e-5)
                [out] = device.step([tape.part(other, boundary + 3, boundary + 20)])
                torch.testing.assert_close(out.double(), tape.out[boundary + 3 : boundary + 20], atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("heads", [(1, 3), (3, 3), (2, 6)])
def test_other_numbers_of_drafts_and_heads(k: int, heads: tuple[int, int]):
    pair = Pair(k, replace(SPEC, key_heads=heads[0], value_heads=heads[1]))
    pair.prompts({0: 1, 1: 40, 2: 3})
    for valid in (1, k + 1, 1, (k + 2) // 2, 1):
        pair.round({0: (k + 1, valid), 1: (valid, valid), 2: (1, 1)})


def test_what_lies_in_dead_records_is_never_read():
    """Between steps all records but the live ones become NaN, and the state of a sequence at 0 does as well."""
    pair = Pair()
    device = pair.devices[1]
    pair.prompts({1: 2, 2: 9})
    for number in range(4):
        cases = {slot: CASES[(slot * 3 + number) % len(CASES)] for slot in (0, 1, 2)}
        for slot in cases:
            live = torch.arange(int(device.state.base[slot]), pair.length[slot]) % device.state.capacity
            dead = torch.ones(device.state.capacity, dtype=torch.bool)
            dead[live] = False
            for records in (device.state.key, device.state.delta, device.state.decay):
                records[slot, dead] = torch.nan
            if not device.state.base[slot]:
                device.state.state[slot] = torch.nan
        pair.round(cases)
