"""The checkpoint's own drafter: its drafts are the formulas' drafts, and what it stores does not depend on the way."""

from __future__ import annotations

import json
import random

import pytest
import torch
from mtp_files import Oracle, with_drafter

from offroad import LLM, SamplingParams


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
    proposer = llm.engine.runner.proposer
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
