"""A small model as the drafter of another: the answers are the model's, and what the drafter stores is what it must."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import answers, edited, engine, like, prompts, spoil, stored, tight, without
from tiny_models import tiny_tokenizer

import offroad.engine as engine_module
import offroad.speculate.attach as attach_module
from offroad import SamplingParams
from offroad.errors import ModelError, PlanError
from offroad.ops import states
from offroad.speculate.draft_model import DraftModelProposer
from offroad.weights.safetensors_source import SafetensorsSource
from offroad.weights.source import Stored

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
COLD = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.1)
WARM = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
# Each family as the drafter of itself (with noise, so that some drafts are right), and some of others.
NOISE = {"llama": 0.1, "gemma3": 0.1, "qwen3_5": 0.04, "gemma4_e": 0.1}
OTHERS = [("llama", "qwen3_5"), ("qwen3_5", "gemma3")]


@pytest.fixture(scope="module")
def alike(tiny, tmp_path_factory):
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = like(tiny(family)[0], tmp_path_factory.mktemp("alike") / family, NOISE[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def plain(tiny):
    """Answers without a drafter, by family and parameters."""
    known: dict = {}

    def make(family: str, params: SamplingParams) -> list[list[int]]:
        key = family, params.temperature
        if key not in known:
            known[key] = answers(engine(tiny(family)[0]), params)
        return known[key]

    return make


@pytest.mark.parametrize(
    ("family", "tokens", "params"), list(zip(NOISE, (4, 2, 3, 1), (COLD, WARM, GREEDY, WARM), strict=True))
)
def test_answers_are_those_of_the_model_alone(family, tokens, params, tiny, alike, plain):
    llm = engine(tiny(family)[0], "draft_model", alike(family), tokens)
    spoil(llm)
    for _ in range(2):  # the second time after prefix hits
        assert answers(llm, params) == plain(family, params)
    stats = llm.engine.stats()
    assert 0.1 * stats.draft_tokens < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.prefix_resumed_tokens > 0


def test_as_many_drafts_as_pay(tiny, alike, plain):
    llm = engine(tiny("qwen3_5")[0], "draft_model", alike("qwen3_5"), "auto")
    spoil(llm)
    assert answers(llm, COLD) == plain("qwen3_5", COLD)
    assert llm.engine.stats().draft_tokens > 0


@pytest.mark.parametrize(("family", "other"), OTHERS)
def test_a_drafter_of_another_family(family, other, tiny, plain):
    llm = engine(tiny(family)[0], "draft_model", tiny(other)[0], 2)
    spoil(llm)
    assert answers(llm, COLD) == plain(family, COLD)


BACK = {"conv": 3, "state": 1}  # rows that a token reads


class Clean:
    """What the drafter alone holds after a sequence, run at once."""

    def __init__(self, folder: Path) -> None:
        self.llm = engine(folder, max_num_seqs=1, max_num_batched_tokens=256, enable_prefix_caching=False)
        self.runner = self.llm.engine.runner
        self.layers = range(len(self.runner.arrays.views))

    def rows(self, known: list[int]) -> dict[str, torch.Tensor]:
        self.llm.generate({"prompt_token_ids": known}, SamplingParams(temperature=0.0, max_tokens=1))
        return stored(self.runner.arrays, self.layers, 1, len(known), BACK)


def watched(monkeypatch, llm) -> list[tuple[list[int], list[int], dict[str, torch.Tensor]]]:
    """(known tokens, drafts, what the drafter holds of all but the last) after each proposal."""
    seen = []
    propose = DraftModelProposer.propose

    def call(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        arrays, runner = self.arrays, llm.engine.runner
        for slot in slots.tolist():
            length = int(arrays.length[slot])
            known = arrays.known(slot).tolist()
            drafts = arrays.tokens[slot, length + 1 : length + 1 + int(arrays.drafted[slot])].tolist()
            own = len(runner.ops["decode"].layers)
            layers = range(own, len(arrays.views))
            seen.append((known, drafts, stored(arrays, layers, slot, length, BACK)))

    monkeypatch.setattr(DraftModelProposer, "propose", call)
    return seen


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "gemma4_e"])
def test_what_is_stored_is_as_in_a_clean_run(family, tiny, alike, monkeypatch):
    clean = Clean(alike(family))
    llm = engine(tiny(family)[0], "draft_model", alike(family), 3, max_num_seqs=3)
    spoil(llm)
    seen = watched(monkeypatch, llm)
    listed = prompts((1, 62))
    for _ in range(2):
        answers(llm, GREEDY, listed)
    assert len(seen) > 15
    checked = seen[::3]
    for known, _, held in checked:
        expected = clean.rows(known[:-1])
        assert held.keys() == expected.keys() != set()
        for item, rows in held.items():
            assert rows.shape == expected[item].shape
            assert (rows - expected[item]).abs().max() < 1e-4, (len(known), item)


def test_a_checkpoint_of_a_boundary_that_accepted_drafts_have_passed(tiny, monkeypatch):
    """The step that begins at 63 ends at 68, and the drafter has run its pending token too when the state behind 63 is
    copied: its rings hold one row more than the model's."""
    folder = tiny("qwen3_5")[0]
    clean, llm = Clean(folder), engine(folder, "draft_model", folder, 4)
    spoil(llm)
    seen = watched(monkeypatch, llm)
    [ids], [answer] = prompts((63,)), answers(llm, GREEDY, prompts((63,)))
    assert [len(known) for known, _, _ in seen[:2]] == [64, 69]
    seen.clear()
    answers(llm, GREEDY, [ids + answer[:6]])
    assert llm.engine.stats().prefix_resumed_tokens == 64
    known, _, held = seen[0]
    expected = clean.rows(known[:-1])
    assert held.keys() == expected.keys()
    assert all((held[item] - expected[item]).abs().max() < 1e-4 for item in held)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_drafts_are_what_the_drafter_alone_would_say(family, tiny, alike, monkeypatch):
    alone = engine(alike(family), enable_prefix_caching=False)
    llm = engine(tiny(family)[0], "draft_model", alike(family), 4)
    spoil(llm)
    seen = watched(monkeypatch, llm)
    answers(llm, GREEDY)
    checked = seen[::4]
    assert len(checked) > 5
    said = answers(
        alone, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), [known for known, _, _ in checked]
    )
    assert [drafts for _, drafts, _ in checked] == said


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_preempted_sequences_answer_alike(family, tiny, alike):
    folder, drafter, listed = (
        tiny(family)[0],
        alike(family),
        prompts((104, 122, 60)),
    )  # the second needs a third block first
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    expected = answers(engine(folder), params, listed)
    small = tight(folder, "draft_model", drafter, max_num_seqs=3, max_num_batched_tokens=256)
    spoil(small)
    assert answers(small, params, listed) == expected
    assert small.engine.stats().preemptions > 0


@pytest.mark.parametrize("which", ["model", "drafter"])
def test_each_checkpoint_may_have_its_own_conventions(which, tiny, monkeypatch):
    """Norm weights that include their one, as in a GGUF file of Gemma-3, beside others that do not: a drafter that is
    the model itself is right always."""

    class PlusOne(SafetensorsSource):
        conventions = frozenset({"norm_plus_one"})

        def read(self, name: str) -> Stored:
            stored = super().read(name)
            return replace(stored, data=stored.data + 1.0) if name.endswith("norm.weight") else stored

    folder = tiny("gemma3")[0]
    opened = {"model": SafetensorsSource, "drafter": SafetensorsSource, which: PlusOne}
    monkeypatch.setattr(engine_module, "open_source", lambda settings, report: opened["model"](folder))
    monkeypatch.setattr(attach_module, "open_source", lambda settings: opened["drafter"](folder))
    llm = engine(folder, "draft_model", folder)
    spoil(llm)
    answers(llm, GREEDY, prompts((40,)))
    stats = llm.engine.stats()
    assert 0 < stats.draft_tokens == stats.accepted_draft_tokens


def test_drafts_stay_within_the_drafters_context(tiny, alike, tmp_path):
    short = edited(alike("llama"), tmp_path / "short", max_position_embeddings=70)
    llm = engine(tiny("llama")[0], "draft_model", short, 4)
    ids = prompts((60,))
    assert answers(llm, GREEDY, ids) == answers(engine(tiny("llama")[0]), GREEDY, ids)
    assert "no drafts from position 70 on, where the drafter's context ends" in llm.engine.plan.notes
    inside = llm.engine.stats().draft_tokens
    assert 0 < inside < 4 * 12
    answers(llm, GREEDY, prompts((100,)))
    assert llm.engine.stats().draft_tokens == inside


def test_a_drafter_that_makes_nan_ends_no_request(tiny, alike, plain):
    llm = engine(tiny("llama")[0], "draft_model", alike("llama"))
    llm.engine.runner.drafting.proposer.ops["decode"].layers[0].tensors["input_norm"].fill_(torch.nan)
    assert answers(llm, COLD) == plain("llama", COLD)
    assert llm.engine.runner.drafting.proposer.last.isnan().all()
    assert llm.engine.stats().draft_tokens > 0


def test_a_drafter_that_does_not_fit_is_refused(tiny, tmp_path):
    folder = tiny("llama")[0]
    with pytest.raises(PlanError, match="301 tokens.*300"):
        engine(folder, "draft_model", edited(folder, tmp_path / "wide", vocab_size=301))
    with pytest.raises(ModelError, match=r"draft\.lm_head\.weight"):
        engine(folder, "draft_model", without(folder, tmp_path / "headless", "lm_head.weight"))
    other = edited(folder, tmp_path / "other")
    values = json.loads(tiny_tokenizer())
    vocab = values["model"]["vocab"]
    vocab["er"], vocab["in"] = vocab["in"], vocab["er"]
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(PlanError, match=r"token 261 is 'er'.*'in' \(4 entries differ\)"):
        engine(folder, "draft_model", other)
    assert vocab["er"] == 261


@pytest.mark.parametrize("store", ["rows", "replay"])
def test_a_recurrent_drafter_of_a_model_whose_states_are_replayed(store, tiny, alike, plain, monkeypatch):
    monkeypatch.setattr(states, "ROWS_SHARE", 0 if store == "replay" else 1)
    llm = engine(tiny("qwen3_5")[0], "draft_model", alike("qwen3_5"), 3)
    spoil(llm)
    assert llm.engine.plan.store == store
    assert answers(llm, GREEDY) == plain("qwen3_5", GREEDY)
    stats = llm.engine.stats()
    assert 0.1 * stats.draft_tokens < stats.accepted_draft_tokens < stats.draft_tokens
