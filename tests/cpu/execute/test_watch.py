"""What the server remembers of its engine: rates over the last seconds, and requests until they end."""

from __future__ import annotations

import pytest

from offroad.execute.watch import WINDOW_SECONDS, Watch
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request, SequenceState, Stats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(clock):
    made = Watch(clock)
    made.started()
    return made


def generated(watch: Watch) -> tuple[float, int]:
    seconds, then, now = watch.window()
    return seconds, now.generated_tokens - then.generated_tokens


def test_before_a_start_there_is_nothing(clock):
    assert Watch(clock).window()[0] == 0


@pytest.mark.parametrize("apart", [0.001, 0.01, 0.1, 0.3, 1.0])
def test_a_steady_rate_is_told_whatever_the_pace_of_steps(watch, clock, apart):
    for step in range(1, int(30 / apart) + 1):
        clock.now = 100 + step * apart
        watch.stepped(Stats(generated_tokens=step * 1000), None)
    seconds, tokens = generated(watch)
    assert seconds == WINDOW_SECONDS
    # The window begins at a step that was kept: at most a quarter of a second, or a step, before it.
    assert tokens / seconds == pytest.approx(1000 / apart, rel=max(0.03, apart / WINDOW_SECONDS))
    assert len(watch._samples) < 100


def test_a_young_engine_is_measured_since_its_start(watch, clock):
    clock.now += 4
    watch.stepped(Stats(generated_tokens=20), None)
    assert generated(watch) == (4, 20)


def test_what_came_before_a_pause_is_not_counted_after_it(watch, clock):
    for after, tokens in ((1, 50), (1.05, 80), (100, 81), (100.1, 90)):
        clock.now = 100 + after
        watch.stepped(Stats(generated_tokens=tokens), None)
    assert generated(watch) == (WINDOW_SECONDS, 10)
    clock.now = 205
    assert generated(watch) == (WINDOW_SECONDS, 10)
    clock.now = 211
    assert generated(watch) == (WINDOW_SECONDS, 0)


def test_another_engine_counts_from_nothing(watch, clock):
    clock.now += 5
    watch.stepped(Stats(generated_tokens=500), [SequenceState("a", 0, "decode", 3, 0, 3, 1)])
    watch.started()
    assert (watch.sequences, watch.last_step) == ([], None)
    clock.now += 1
    watch.stepped(Stats(generated_tokens=7), None)
    assert generated(watch) == (1, 7)


def test_requests_are_known_until_they_end(watch, clock):
    watch.submitted(Request(id="a", prompt_ids=[1, 2, 3], params=SamplingParams()))
    clock.now += 2
    told = [SequenceState("a", 0, "decode", 3, 0, 3, 1)]
    watch.stepped(Stats(), told)
    watch.stepped(Stats(), None)
    assert (watch.requests["a"].began, watch.requests["a"].prompt, watch.sequences) == (100.0, 3, told)
    watch.ended("a")
    watch.ended("a")
    assert watch.requests == {}
