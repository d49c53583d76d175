"""Greedy tokens and logits equal transformers', from the same real weights."""

from __future__ import annotations

import numpy as np
import torch

from offroad import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def test_greedy_tokens_and_logits_equal_transformers(llm: LLM, oracle, prompts, monkeypatch, pytestconfig):
    """64 greedy tokens of each prompt are what transformers would choose, and the logits are within 1e-3.

    transformers gets prompt + our tokens in one pass: if each of our tokens is its argmax given those before, greedy
    decoding there gives the same tokens, by induction.
    """
    seen: dict[int, list[tuple[int, torch.Tensor]]] = {}
    draw = llm.engine.runner.sampler.draw

    def watch(logits, slots: np.ndarray, positions: np.ndarray, *more):
        for row, position in enumerate(positions):
            seen.setdefault(int(position), []).append(logits[row].clone())
        return draw(logits, slots, positions, *more)

    monkeypatch.setattr(llm.engine.runner.sampler, "draw", watch)
    worst = 0.0
    prompts = prompts if pytestconfig.getoption("thorough") else prompts[::2]
    for ids in prompts:
        seen.clear()
        [result] = llm.generate({"prompt_token_ids": ids}, GREEDY)
        ours = result.outputs[0].token_ids
        assert len(ours) == 64
        expected = oracle.logits(ids + ours)[len(ids) - 1 : -1]
        assert ours == expected.argmax(-1).tolist()
        got = torch.stack([seen[len(ids) + i][0] for i in range(64)])
        worst = max(worst, (got - expected).abs().max().item())
    print(f"largest logit difference over {len(prompts)} prompts: {worst:.2e}")
    assert worst < 1e-3
