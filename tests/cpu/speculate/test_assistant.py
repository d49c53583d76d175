"""The Gemma-4 assistant: its drafts are transformers' own, it never writes, and answers are the model's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from assistant_files import oracle, write_assistant
from drafters import answers, edited, engine, prompts, spoil, stored, tight, without
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from offroad import SamplingParams
from offroad.errors import ModelError, PlanError, SettingsError
from offroad.models.gemma4_assistant import Gemma4Assistant
from offroad.settings import Settings
from offroad.speculate.assistant import AssistantProposer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.1)
HOT = SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
# Around the window of 16, and around a block of 64, below which a key of the window lies.
SIZES = (1, 15, 17, 18, 62, 64)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    made: dict = {}

    def make(family: str, ordered: bool = False) -> tuple[Path, torch.nn.Module]:
        key = family, ordered
        if key not in made:
            folder = tmp_path_factory.mktemp("assistant") / "checkpoint"
            made[key] = folder, write_assistant(family, folder, ordered)
        return made[key]

    return make


def watched(monkeypatch) -> tuple[list[tuple[list[int], list[int]]], list[torch.Tensor]]:
    """(known tokens, drafts) of each proposal, and the logits in the order of drafts."""
    seen, scores = [], []
    propose, logits = AssistantProposer.propose, Gemma4Assistant.logits

    def proposed(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        for slot in slots.tolist():
            known = self.arrays.known(slot).tolist()
            drafts = self.arrays.tokens[slot, len(known) : len(known) + int(self.arrays.drafted[slot])].tolist()
            seen.append((known, drafts))

    def scored(self, state, ops):
        scores.append(logits(self, state, ops))
        return scores[-1]

    monkeypatch.setattr(AssistantProposer, "propose", proposed)
    monkeypatch.setattr(Gemma4Assistant, "logits", scored)
    return seen, scores


@pytest.mark.parametrize(("family", "ordered"), [("gemma4", False), ("gemma4", True), ("gemma4_e", True)])
def test_drafts_are_those_of_transformers(family, ordered, tiny, assistant, monkeypatch):
    target, (folder, module) = tiny(family), assistant(family, ordered)
    llm = engine(target[0], "gemma4_assistant", folder, 3, max_num_seqs=1)
    spoil(llm)
    seen, scores = watched(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for ids in prompts(SIZES):
        llm.generate({"prompt_token_ids": ids}, params)
    assert len(seen) > 3 * len(SIZES)
    for i, (known, drafts) in enumerate(seen):
        expected, logits = oracle(target[1], module, known, 3)
        assert drafts == expected, len(known)
        for depth in range(3):
            found = scores[3 * i + depth][0]
            scored = found > -torch.inf
            assert int(scored.sum()) == (60 if ordered else 300)
            assert (found - logits[depth])[scored].abs().max() < 1e-4, (len(known), depth)


def test_a_window_of_a_whole_block(tiny, assistant, tmp_path, monkeypatch):
    """The key before the window lies in a block that the model's own queries need no more."""
    from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

    folder, drafter = tiny("gemma4")[0], assistant("gemma4")[0]
    text = json.loads((drafter / "config.json").read_text())["text_config"]
    folder = edited(folder, tmp_path / "model", sliding_window=64)
    drafter = edited(drafter, tmp_path / "drafter", text_config=text | {"sliding_window": 64})
    target = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    module = Gemma4AssistantForCausalLM.from_pretrained(drafter)
    llm = engine(folder, "gemma4_assistant", drafter, 2, max_num_batched_tokens=256, enable_prefix_caching=False)
    spoil(llm)
    seen, scores = watched(monkeypatch)
    answers(llm, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), prompts((128,)))
    assert [len(known) for known, _ in seen] == [129, 130, 131]
    for i, (known, drafts) in enumerate(seen):
        expected, logits = oracle(target, module, known, 2)
        assert drafts == expected
        assert (scores[2 * i][0] - logits[0]).abs().max() < 1e-4


def test_the_first_round_is_that_of_generate(tiny, assistant, monkeypatch):
    target, (folder, module) = tiny("gemma4"), assistant("gemma4", True)
    [ids] = prompts((40,))
    recorded, forward = [], module.forward

    def recording(**given):
        recorded.append(forward(**given))
        return recorded[-1]

    monkeypatch.setattr(module, "forward", recording)
    module.generation_config.num_assistant_tokens = 3
    module.generation_config.num_assistant_tokens_schedule = "constant"
    target[1].generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, assistant_model=module)
    llm = engine(target[0], "gemma4_assistant", folder, 3)
    seen, scores = watched(monkeypatch)
    answers(llm, GREEDY, [ids])
    assert seen[0][1] == [int(out.logits.argmax()) for out in recorded[:3]]
    for found, out in zip(scores[:3], recorded[:3], strict=True):
        scored = found[0] > -torch.inf
        assert (found[0] - out.logits[0, 0])[scored].abs().max() < 1e-4


def told(monkeypatch, listed: list[list[int]], seed: int) -> None:
    """The drafter drafts, and then part of it is replaced by the truth, with a mistake in half the cases."""
    rng, propose = random.Random(seed), AssistantProposer.propose

    def call(self, turn, slots, counts):
        propose(self, turn, slots, counts)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            known = self.arrays.known(slot).tolist()
            whole = next((ids for ids in listed if ids[: len(known)] == known), None)
            if whole is None or not count:
                continue
            drafts = torch.tensor(whole[len(known) : len(known) + rng.randrange(count + 1)], dtype=torch.int64).numpy()
            if len(drafts) and rng.random() < 0.5:
                drafts[rng.randrange(len(drafts))] = rng.randrange(3, 290)
            self.arrays.draft(slot, drafts)

    monkeypatch.setattr(AssistantProposer, "propose", call)


@pytest.mark.parametrize(
    ("family", "ordered", "tokens", "params"),
    [
        ("gemma4", False, 4, WARM),
        ("gemma4_e", True, 3, GREEDY),
        ("gemma4_moe", True, 1, HOT),
        ("gemma4_e", False, 2, HOT),
    ],
)
def test_answers_are_those_of_the_model_alone(family, ordered, tokens, params, tiny, assistant, monkeypatch):
    expected = answers(engine(tiny(family)[0]), params)
    told(monkeypatch, [ids + answer for ids, answer in zip(prompts(), expected, strict=True)], seed=tokens)
    llm = engine(tiny(family)[0], "gemma4_assistant", assistant(family, ordered)[0], tokens)
    spoil(llm)
    for _ in range(2):  # the second time after prefix hits
        assert answers(llm, params) == expected
    stats = llm.engine.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.prefix_resumed_tokens > 0


def test_preempted_sequences_answer_alike(tiny, assistant, monkeypatch):
    listed = prompts((104, 122, 60))  # the second needs a third block first
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30, ignore_eos=True)
    expected = answers(engine(tiny("gemma4")[0]), params, listed)
    told(monkeypatch, [ids + answer for ids, answer in zip(listed, expected, strict=True)], seed=5)
    small = tight(tiny("gemma4")[0], "gemma4_assistant", assistant("gemma4")[0], max_num_seqs=3)
    spoil(small)
    assert answers(small, params, listed) == expected
    assert small.engine.stats().preemptions > 0


def test_scores_of_prompts_change_no_draft(tiny, assistant, monkeypatch):
    """All hidden states leave the model then, and the drafter still finds those that it begins from."""
    llm = engine(tiny("gemma4")[0], "gemma4_assistant", assistant("gemma4")[0], 3, max_num_seqs=2)
    seen, _ = watched(monkeypatch)
    given, runs = [{"prompt_token_ids": ids} for ids in prompts((1, 30, 64, 90))], []
    for scored in (None, 2):
        llm.engine.reset_prefix_cache()
        results = llm.generate(given, replace(GREEDY, prompt_logprobs=scored))
        assert all((result.prompt_logprobs is None) == (scored is None) for result in results)
        runs.append((list(seen), [result.outputs[0].token_ids for result in results]))
        seen.clear()
    assert runs[0] == runs[1]
    llm.engine.check()


@pytest.mark.parametrize("family", ["gemma4", "gemma4_e"])
def test_the_models_rows_are_the_same_bytes_with_and_without_it(family, tiny, assistant, monkeypatch):
    """Drafts are made and dropped, so that the model runs the same steps; no byte of any page changes meanwhile."""
    propose = AssistantProposer.propose

    def dropped(self, turn, slots, counts):
        views = [view for views in llm.engine.runner.arrays.views for view in views.values()]
        before = [plane.view(torch.uint8).clone() for view in views for plane in (view.k, view.v)]
        propose(self, turn, slots, counts)
        after = [plane.view(torch.uint8) for view in views for plane in (view.k, view.v)]
        assert all(map(torch.equal, before, after))
        assert self.arrays.drafted[slots].all()
        self.arrays.drafted[slots] = 0

    def rows(llm) -> list[dict[str, torch.Tensor]]:
        runner, found = llm.engine.runner, []
        launch = runner.launch

        def watched(step):
            launch(step)
            layers = range(len(runner.ops["decode"].layers))
            found.extend(stored(runner.arrays, layers, s, int(runner.arrays.length[s]), {}) for s in step.slot.tolist())

        monkeypatch.setattr(runner, "launch", watched)
        answers(llm, GREEDY)
        return found

    alone = rows(engine(tiny(family)[0], max_num_batched_tokens=256))
    monkeypatch.setattr(AssistantProposer, "propose", dropped)
    llm = engine(tiny(family)[0], "gemma4_assistant", assistant(family)[0], max_num_batched_tokens=256)
    beside = rows(llm)
    assert len(beside) == len(alone) == 8 * len(prompts())
    for one, other in zip(alone, beside, strict=True):
        assert one.keys() == other.keys() != set()
        assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
    own = len(llm.engine.runner.ops["decode"].layers)
    drafters = [view for views in llm.engine.runner.arrays.views[own:] for view in views.values()]
    assert [view.writable for view in drafters] == [False] * 4


def test_an_assistant_that_makes_nan_ends_no_request(tiny, assistant):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=6, ignore_eos=True)
    expected = answers(engine(tiny("gemma4")[0]), params)
    for ordered in (False, True):
        llm = engine(tiny("gemma4")[0], "gemma4_assistant", assistant("gemma4", ordered)[0])
        llm.engine.runner.drafting.proposer.ops.layers[0].tensors["input_norm"].fill_(torch.nan)
        assert answers(llm, params) == expected
        assert llm.engine.stats().draft_tokens > 0


def test_what_is_no_assistant_of_the_model_is_refused(tiny, assistant, tmp_path):
    folder, drafter = tiny("gemma4")[0], assistant("gemma4", True)[0]
    with pytest.raises(PlanError, match=r"Gemma4ForCausalLM.*Gemma4AssistantForCausalLM"):
        engine(folder, "gemma4_assistant", folder)
    with pytest.raises(PlanError, match="a llama model.*a Gemma-4 model"):
        engine(tiny("llama")[0], "gemma4_assistant", drafter)
    with pytest.raises(PlanError, match="1 KV heads of 16, window 16, as layer 3"):
        engine(tiny("gemma4_e")[0], "gemma4_assistant", drafter)
    with pytest.raises(PlanError, match="96 hidden states.*one for 64"):
        engine(folder, "gemma4_assistant", edited(drafter, tmp_path / "wide", backbone_hidden_size=96))
    with pytest.raises(PlanError, match="7 of 7 centroids over 300 tokens"):
        odd = edited(drafter, tmp_path / "odd", num_centroids=7, centroid_intermediate_top_k=7)
        engine(folder, "gemma4_assistant", odd)
    with pytest.raises(ModelError, match=r"tensor draft\.pre_projection\.weight.*absent"):
        engine(folder, "gemma4_assistant", without(drafter, tmp_path / "none", "pre_projection.weight"))
    with pytest.raises(ModelError, match="Gemma4AssistantForCausalLM"):
        engine(folder, "draft_model", drafter)


def test_the_unified_models_assistant_is_the_same_under_another_name(tiny, assistant, tmp_path, monkeypatch):
    folder, drafter = tiny("gemma4")[0], assistant("gemma4")[0]
    seen, _ = watched(monkeypatch)
    unified = edited(drafter, tmp_path / "unified", architectures=["Gemma4UnifiedAssistantForCausalLM"])
    for each in (drafter, unified):
        answers(engine(folder, "gemma4_assistant", each), GREEDY, prompts((30,)))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] != []


def test_an_order_of_tokens_that_is_none_is_refused(tiny, assistant, tmp_path):
    to = edited(assistant("gemma4", True)[0], tmp_path / "order")
    tensors, name = load_file(to / "model.safetensors"), "masked_embedding.token_ordering"
    for wrong, message in ((tensors[name] + 1, "1 to 300.*0 to 299"), (tensors[name].float(), "stored as f32.*i64")):
        save_file(tensors | {name: wrong}, to / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            engine(tiny("gemma4")[0], "gemma4_assistant", to)


@pytest.mark.parametrize("method", ["draft_model", "gemma4_assistant"])
def test_a_separate_drafter_must_be_named_and_others_must_not(method):
    with pytest.raises(SettingsError, match="model; found: none"):
        Settings.of(model="m", speculative_config=f'{{"method": "{method}"}}')
    with pytest.raises(SettingsError, match="model; found: x"):
        Settings.of(model="m", speculative_config='{"method": "ngram", "model": "x"}')
