"""The checkpoint's own drafter: its drafts are the formulas' drafts, and what it stores does not depend on the way."""

from __future__ import annotations

import json
import random

import pytest
import torch
from mtp_files import Oracle, with_drafter

from offroad import LLM, PlanError, SamplingParams


def config(tokens: int) -> str:
    return json.dumps({"method": "mtp", "num_speculative_tokens": tokens})


def engine(folder, tokens: int, **settings) -> LLM:
    values = dict(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=48) | settings
    return LLM(str(folder), speculative_config=config(tokens) if tokens else "", **values)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 290) for _ in range(n)] for n in (1, 14, 63, 64, 65, 100)]


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params)
    llm.engine.check()
    return [result.outputs[0].token_ids for result in found]


@pytest.fixture(scope="module")
def drafted(tiny, tmp_path_factory):
    made = {}

    def make(family: str):
        if family not in made:
            folder, model = tiny(family)
            to = tmp_path_factory.mktemp("mtp") / family
            made[family] = (to, model, with_drafter(folder, to, family))
        return made[family]

    return make


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_drafts_are_those_of_the_formulas(family: str, drafted, monkeypatch):
    folder, model, made = drafted(family)
    oracle = Oracle(model, made, family)
    llm = engine(folder, tokens=3)
    proposer = llm.engine.runner.drafting.proposer
    seen: list[tuple[list[int], list[int]]] = []
    propose = type(proposer).propose

    def watched(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        for slot in slots.tolist():
            known = self.arrays.known(slot).tolist()
            drafts = self.arrays.tokens[slot, len(known) : len(known) + int(self.arrays.drafted[slot])].tolist()
            seen.append((known, drafts))

    monkeypatch.setattr(type(proposer), "propose", watched)
    scores: list[torch.Tensor] = []
    head = proposer.ops["decode"].logits
    monkeypatch.setattr(proposer.ops["decode"], "logits", lambda h: scores.append(head(h)) or scores[-1], raising=False)
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    for ids in prompts():
        llm.generate({"prompt_token_ids": ids}, params)
    assert len(seen) > 25
    for i, (known, drafts) in enumerate(seen):
        expected, logits = oracle.drafts(known, 3)
        assert drafts == expected, len(known)
        for depth in range(3):
            assert (scores[3 * i + depth][0] - logits[depth]).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_answers_are_those_without_drafts(family: str, tokens: int, drafted):
    folder, *_ = drafted(family)
    plain, llm = engine(folder, tokens=0), engine(folder, tokens=tokens)
    for temperature in (0.0, 0.8, 1.0):
        params = SamplingParams(temperature=temperature, seed=11, max_tokens=24, ignore_eos=True)
        expected = answers(plain, params)
        for _ in range(2):  # the second time after prefix hits
            assert answers(llm, params) == expected
    stats = llm.engine.stats()
    assert stats.prefix_resumed_tokens > 0
    assert stats.draft_tokens > 500


def test_preempted_sequences_answer_alike(drafted):
    folder, *_ = drafted("qwen3_5")
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    listed = [{"prompt_token_ids": [3 + (7 * i + j * j) % 280 for j in range(50)]} for i in range(3)]
    expected = [r.outputs[0].token_ids for r in engine(folder, tokens=0).generate(listed, params)]
    memory = engine(folder, tokens=3).engine.plan.memory
    kept = 2 * memory.checkpoint_bytes
    few = 6 * memory.history_block_bytes + kept
    small = engine(folder, tokens=3, kv_cache_memory_bytes=few, max_model_len=192, checkpoint_memory_bytes=kept)
    assert [r.outputs[0].token_ids for r in small.generate(listed, params)] == expected
    assert small.engine.stats().preemptions > 0
    small.engine.check()


def test_a_right_drafter_saves_steps(drafted, monkeypatch):
    """The drafter tells the model's own next tokens: every step moves by all its drafts and one."""
    folder, model, _ = drafted("qwen3_5")
    llm = engine(folder, tokens=2)
    proposer = llm.engine.runner.drafting.proposer
    propose = type(proposer).propose

    @torch.inference_mode()
    def right(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        for slot in slots.tolist():
            known = self.arrays.known(slot).tolist()
            for _ in range(int(self.arrays.drafted[slot])):
                known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
                self.arrays.tokens[slot, len(known) - 1] = known[-1]

    monkeypatch.setattr(type(proposer), "propose", right)
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    [found] = llm.generate({"prompt_token_ids": prompts()[1]}, params)
    stats = llm.engine.stats()
    assert (found.usage.drafts, found.usage.accepted_drafts) == (16, 16)
    assert stats.steps == 1 + 8


@pytest.mark.parametrize("damage", ["nan", "zero"])
def test_a_broken_drafter_changes_no_answer(damage: str, drafted, monkeypatch):
    folder, *_ = drafted("qwen3_5")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = answers(engine(folder, tokens=0), params)
    llm = engine(folder, tokens=3)
    norm = llm.engine.runner.drafting.proposer.ops["decode"].layers[0].following
    norm.fill_(float("nan") if damage == "nan" else 0.0)
    assert answers(llm, params) == expected


def test_a_checkpoint_without_a_drafter_is_refused_at_plan_time(tiny):
    for family, message in (("qwen3_5", r"no tensor mtp\.fc\.weight"), ("llama", "no such drafter")):
        with pytest.raises(PlanError, match=message):
            engine(tiny(family)[0], tokens=2)
