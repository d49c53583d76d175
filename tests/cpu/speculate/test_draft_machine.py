"""Random chats on real engines with drafts: tokens, keys, states, pairs and carries are those of clean runs.

A few examples of each family; 500 with `--hypothesis-profile=more`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from draft_play import MAX_LEN, MODES, Play, Truth
from engine_runs import tokens
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
from mtp_files import with_drafter

SYSTEM = [tokens("system a", 140), tokens("system b", 70)]
BLOCK = 64
SIZES = (
    dict(blocks=12, places=2, max_num_seqs=2),
    dict(blocks=5, places=5, max_num_seqs=4),
    dict(blocks=9, places=3, max_num_seqs=3),
)


class Drafted(RuleBasedStateMachine):
    """`truth` and `seen` belong to a family and are set in a subclass."""

    truth: Truth
    seen: Counter

    @initialize(
        sizes=st.sampled_from(SIZES), chunk=st.sampled_from([50, 512]), k=st.integers(1, 4), replay=st.booleans()
    )
    def begin(self, sizes, chunk, k, replay):
        self.play = Play(self.truth, k=k, replay=replay, seen=self.seen, max_num_batched_tokens=chunk, **sizes)

    def then_new(self, data, prefix: list[int]) -> None:
        """Submits a prompt of these and new tokens; half of them end within a few tokens of a block's end."""
        count = data.draw(st.integers(1, 70), "new tokens")
        if data.draw(st.booleans(), "near a block's end"):
            count = 1 + (count % 6 - 4 - len(prefix)) % BLOCK
        prompt = prefix + tokens(f"user {len(self.play.told)}", count)
        self.play.submit(
            prompt,
            data.draw(st.sampled_from([1, 3, 8, 18]), "answer"),
            data.draw(st.sampled_from([0.0, 0.8, 1.0]), "temperature"),
            data.draw(st.sampled_from(MODES), "drafts"),
            data.draw(st.sampled_from([1, 1, 1, 2, 3]), "n"),
            tuple(data.draw(st.lists(st.integers(1, len(prompt)), max_size=2), "marks")),
        )

    def history(self, data) -> list[int]:
        """What an earlier request has come to, whether it has ended, runs, or was aborted."""
        name = data.draw(st.sampled_from(sorted({name for name, _ in self.play.told})), "earlier")
        return self.play.history(name)[: MAX_LEN - 80]

    @rule(data=st.data(), system=st.sampled_from(SYSTEM), whole=st.booleans(), count=st.sampled_from([1, 1, 2]))
    def new_chats(self, data, system, whole, count):
        for _ in range(count):
            self.then_new(data, system[: None if whole else data.draw(st.integers(0, len(system)))])

    @rule(temperature=st.sampled_from([0.0, 1.0]), modes=st.sampled_from(MODES))
    def crowd(self, temperature, modes):
        """Answers that come to need more blocks than there are: somebody is preempted."""
        for i in range(3):
            self.play.submit(tokens(f"crowd {i}", 118 + i), 16, temperature, modes)

    @precondition(lambda self: self.play.told)
    @rule(data=st.data())
    def next_turn(self, data):
        self.then_new(data, self.history(data))

    @precondition(lambda self: self.play.told)
    @rule(data=st.data())
    def branch(self, data):
        history = self.history(data)
        self.then_new(data, history[: data.draw(st.integers(0, len(history)), "at")])

    @precondition(lambda self: self.play.engine.has_work())
    @rule(data=st.data(), steps=st.integers(0, 3))
    def abort(self, data, steps):
        self.steps(steps)
        if going := self.play.going():
            answering = [name for name in going if self.play.told[name, 0].tokens]
            self.play.abort(data.draw(st.sampled_from(answering or going), "which"))
            self.play.step()

    @precondition(lambda self: self.play.engine.has_work())
    @rule(most=st.sampled_from([1, 3, 10, 1000]))
    def steps(self, most):
        while most and self.play.engine.has_work():
            self.play.step()
            most -= 1

    @precondition(lambda self: self.play.told)
    @rule(sure=st.sampled_from([False, False, False, True]))
    def reset(self, sure):
        if sure:
            self.play.engine.reset_prefix_cache()

    @invariant()
    def books(self):
        if hasattr(self, "play"):
            self.play.engine.check()

    def teardown(self):
        if hasattr(self, "play"):
            self.play.finish()


SEEN = (
    "ended",
    "resumed",
    "all accepted",
    "some accepted",
    "none accepted",
    "no drafts after accepted ones",
)
STATES = ("checkpoint rows", "captured inside a step", "preempted")


@pytest.mark.parametrize(
    ("family", "method", "examples", "wanted"),
    [("llama", "ngram", 2, SEEN), ("gemma4_e", "ngram", 2, SEEN), ("qwen3_5", "mtp", 4, (*SEEN, *STATES))],
)
def test_drafts_change_nothing(tiny, tmp_path, family, method, examples, wanted):
    folder, _ = tiny(family)
    if method == "mtp":
        with_drafter(folder, tmp_path / family, family)
        folder = tmp_path / family
    asked = settings().max_examples  # 100, if no profile says otherwise
    machine = type("Machine", (Drafted,), dict(truth=Truth(folder, method), seen=Counter()))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples if asked <= 100 else asked * examples // 8,
            stateful_step_count=15,
            derandomize=asked <= 100,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    for what in wanted:
        assert machine.seen[what], f"the chats do not exercise: {what}"
