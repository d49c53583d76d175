"""Drafters of their own checkpoints on a GPU, in graphs and eagerly: tokens of the model alone, drafts of transformers.

In fp32; `--allow-reference` runs what has no kernel for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

CPU = Path(__file__).parents[1] / "cpu"
sys.path += [str(CPU), str(CPU / "speculate")]
from assistant_files import oracle, write_assistant  # noqa: E402
from drafters import answers, engine, like, spoil  # noqa: E402
from tiny_models import write_tiny  # noqa: E402

from offroad import SamplingParams  # noqa: E402
from offroad.speculate.assistant import AssistantProposer  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = dict(device="cuda", allow_reference=True, threads=0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_draft_model(family: str, eager: bool, tmp_path: Path):
    write_tiny(family, tmp_path / "model")
    drafter = like(tmp_path / "model", tmp_path / "drafter", 0.04)
    plain = engine(tmp_path / "model", **CUDA, enforce_eager=eager)
    drafted = engine(tmp_path / "model", "draft_model", drafter, 3, **CUDA, enforce_eager=eager)
    spoil(drafted)
    for params in (GREEDY, WARM):
        expected = answers(plain, params)
        for _ in range(2):
            assert answers(drafted, params) == expected
    assert drafted.engine.stats().accepted_draft_tokens > 0


@pytest.mark.parametrize("ordered", [False, True])
def test_the_assistant_drafts_as_transformers_does(ordered: bool, tmp_path: Path, monkeypatch):
    target = write_tiny("gemma4", tmp_path / "model")
    module = write_assistant("gemma4", tmp_path / "assistant", ordered)
    plain = engine(tmp_path / "model", **CUDA)
    drafted = engine(tmp_path / "model", "gemma4_assistant", tmp_path / "assistant", 3, **CUDA)
    spoil(drafted)
    seen, propose = [], AssistantProposer.propose

    def watched(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        for slot in slots.tolist():
            known = self.arrays.known(slot).tolist()
            drafts = self.arrays.tokens[slot, len(known) : len(known) + int(self.arrays.drafted[slot])].tolist()
            seen.append((known, drafts))

    monkeypatch.setattr(AssistantProposer, "propose", watched)
    assert answers(drafted, GREEDY) == answers(plain, GREEDY)
    right = [drafts == oracle(target, module, known, len(drafts))[0] for known, drafts in seen[::4]]
    assert sum(right) >= 0.9 * len(right)  # rounding may turn the order of two tokens that score nearly alike
