"""Random chats on a real engine with little memory: what is resumed gives what a cold run gives, and no book is wrong.

Conversations share prefixes, branch at any token, go on, are aborted, and outgrow the memory for blocks, windows and
checkpoints, so that matches that fall short and evictions come by themselves.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from engine_runs import Answer, Session, ask, assert_same, engine_of, run, small_engine, tokens
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offroad.engine import Engine
from offroad.schedule.request import Request

MAX_LEN = 320
SYSTEM = [tokens("system a", 140), tokens("system b", 70)]
BLOCK = 64
# Much history with few windows and checkpoints; little history for many sequences; and something between.
SIZES = (
    dict(blocks=12, places=2, max_num_seqs=2),
    dict(blocks=6, places=5, max_num_seqs=4),
    dict(blocks=9, places=3, max_num_seqs=3),
)


class Colds:
    """Answers of requests that run alone in memory, by what was asked: each is made once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.known = engine, {}

    def of(self, requests: list[Request]) -> dict[str, Answer]:
        key = {r.id: (tuple(r.prompt_ids), r.params.max_tokens, r.params.temperature) for r in requests}
        new = {key[r.id]: r for r in requests if key[r.id] not in self.known}
        answers = run(self.engine, list(new.values()))
        self.known |= {key[name]: answer for name, answer in answers.items()}
        return {name: self.known[k] for name, k in key.items()}


class Chats(RuleBasedStateMachine):
    """`folder`, `colds` and `seen` belong to a family and are set in a subclass."""

    folder: Path
    colds: Colds
    seen: Counter

    @initialize(sizes=st.sampled_from(SIZES), chunk=st.sampled_from([50, 512]))
    def begin(self, sizes, chunk):
        settings = sizes | dict(max_num_batched_tokens=chunk, max_model_len=MAX_LEN, checkpoint_interval=192)
        self.engine = small_engine(self.folder, **settings)
        self.session = Session(self.engine)
        self.asked: dict[str, Request] = {}

    # --- requests -----------------------------------------------------------------------------------------------------
    def submit(self, data, prompt: list[int]) -> None:
        name, count = f"r{len(self.asked)}", data.draw(st.sampled_from([1, 3, 6, 18]), "answer")
        marks = tuple(data.draw(st.lists(st.integers(1, len(prompt)), max_size=2), "marks"))
        self.asked[name] = ask(name, prompt, count, data.draw(st.sampled_from([0.0, 0.8]), "temperature"), marks)
        self.session.submit(self.asked[name])

    def then_new(self, data, prefix: list[int]) -> None:
        """Submits a prompt of these and new tokens; half of them end within a few tokens of a block's end."""
        count = data.draw(st.integers(1, 70), "new tokens")
        if data.draw(st.booleans(), "near a block's end"):
            count = 1 + (count % 6 - 4 - len(prefix)) % BLOCK
        self.submit(data, prefix + tokens(f"user {len(self.asked)}", count))

    def history(self, data) -> list[int]:
        """What an earlier request has come to, whether it has ended, runs, or was aborted."""
        name = data.draw(st.sampled_from(sorted(self.asked)), "earlier")
        return (self.asked[name].prompt_ids + self.session.answers[name].tokens)[: MAX_LEN - 80]

    @rule(data=st.data(), system=st.sampled_from(SYSTEM), whole=st.booleans(), count=st.sampled_from([1, 1, 3]))
    def new_chats(self, data, system, whole, count):
        for _ in range(count):
            self.then_new(data, system[: None if whole else data.draw(st.integers(0, len(system)))])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def next_turn(self, data):
        self.then_new(data, self.history(data))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def branch(self, data):
        history = self.history(data)
        self.then_new(data, history[: data.draw(st.integers(0, len(history)), "at")])

    @precondition(lambda self: self.engine.has_work())
    @rule(data=st.data(), steps=st.integers(0, 3))
    def abort(self, data, steps):
        """Ends one that has begun to answer, if there is one."""
        self.steps(steps)
        going = sorted(name for name in self.asked if not self.session.answers[name].ended)
        answering = [name for name in going if self.session.answers[name].tokens]
        if going:
            self.engine.abort(data.draw(st.sampled_from(answering or going), "which"))
            self.seen["aborted with tokens"] += bool(answering)
            self.step()

    # --- steps --------------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.engine.has_work())
    @rule(most=st.sampled_from([1, 3, 10, 1000]))
    def steps(self, most):
        while most and self.engine.has_work():
            self.step()
            most -= 1

    def step(self) -> None:
        before = self.resumable()
        self.session.step()
        history = self.engine.scheduler.cache.history.index
        self.seen["evicted"] += sum(key in history for key in before - self.resumable())

    def resumable(self) -> set[bytes]:
        """Keys of boundaries with a checkpoint that follows nobody, or with a window block that is kept for a mark."""
        cache = self.engine.scheduler.cache
        kept = {key for key, block in cache.window.index.items() if cache.window.sticky[block]}
        return kept | {key for key, found in cache.checkpoints.index.items() if not found.rolling}

    @precondition(lambda self: self.asked)
    @rule(sure=st.sampled_from([False, False, False, True]))
    def reset(self, sure):
        if sure:
            self.engine.reset_prefix_cache()

    @invariant()
    def books(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.steps(1000)
        self.engine.check()
        answers = self.session.answers
        cold = self.colds.of(list(self.asked.values()))
        assert_same({name: answer for name, answer in answers.items() if answer.ended == "length"}, cold)
        for name, answer in answers.items():
            assert answer.tokens == cold[name].tokens[: len(answer.tokens)], "an aborted answer"
            self.seen["fell short"] += answer.matched > answer.cached
            self.seen["ended"] += answer.ended == "length"
        self.seen["resumed"] += self.engine.stats().prefix_resumed_tokens


SEEN = ("ended", "resumed", "fell short")


@pytest.mark.parametrize(
    ("family", "examples", "wanted"),
    [("gemma4_e", 5, SEEN), ("qwen3_5", 8, (*SEEN, "evicted", "aborted with tokens"))],
)
def test_resumed_answers_equal_cold_ones(tiny, family, examples, wanted):
    folder, _ = tiny(family)
    colds = Colds(engine_of(folder, max_num_seqs=8, max_model_len=MAX_LEN, enable_prefix_caching=False))
    machine = type("Machine", (Chats,), dict(folder=folder, colds=colds, seen=Counter()))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in wanted:
        assert machine.seen[what], f"the chats do not exercise: {what}"
