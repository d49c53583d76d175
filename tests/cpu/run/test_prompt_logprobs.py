"""Log-probabilities of prompts are those of transformers, however prompts are cut into chunks, whatever is cached."""

from __future__ import annotations

import pytest
import torch
from engine_runs import ask, engine_of, run, tokens
from msgspec.structs import replace

from offroad import LLM, SamplingParams
from offroad.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
FAMILIES = ["llama", "qwen3", "gemma3", "gemma4", "qwen3_5"]


def expected(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-softmax of the logits, [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def assert_scores(found, ids: list[int], wanted: torch.Tensor, top: int) -> None:
    assert found[0] is None
    assert len(found) == len(ids)
    for i, entry in enumerate(found[1:]):
        row, id = wanted[i], ids[i + 1]
        assert entry.logprob == pytest.approx(float(row[id]), abs=2e-4)
        assert len(entry.top) == top
        for place, (token, value) in enumerate(entry.top):
            assert value == pytest.approx(float(row.topk(top).values[place]), abs=2e-4)
            assert value == pytest.approx(float(row[token]), abs=2e-4)
        # Others so near that rounding decides between them may change places.
        at_least, at_most = (1 + int((row > row[id] + shift).sum()) for shift in (4e-4, -4e-4))
        assert at_least <= entry.rank <= at_most


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(tiny, family: str):
    folder, model = tiny(family)
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_batched_tokens=48, max_num_seqs=4)
    prompts = [tokens("a", 140), tokens("b", 33), tokens("c", 1), tokens("d", 2)]
    plain = [{"prompt_token_ids": ids} for ids in prompts]
    before = llm.generate(plain, replace(GREEDY, prompt_logprobs=None))  # they lie in the prefix cache then
    assert all(result.prompt_logprobs is None for result in before)
    wanted = [expected(model, ids) for ids in prompts]
    for _ in range(2):
        results = llm.generate(plain, GREEDY)
        for result, was, ids, rows in zip(results, before, prompts, wanted, strict=True):
            assert_scores(result.prompt_logprobs, ids, rows, 4)
            assert result.outputs[0].token_ids == was.outputs[0].token_ids
            assert result.usage.cached_tokens == 0
    again = llm.generate(plain[0], replace(GREEDY, prompt_logprobs=None))[0]
    assert again.usage.cached_tokens > 0  # what was scored is cached for others
    llm.engine.check()


def test_sequences_of_one_prompt_and_batch_mates(tiny):
    folder, model = tiny("llama")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_batched_tokens=40, max_num_seqs=4)
    prompts = [tokens("a", 90), tokens("b", 50)]
    params = [replace(GREEDY, n=2, prompt_logprobs=0, logprobs=1), replace(GREEDY, prompt_logprobs=None)]
    one, other = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert_scores(one.prompt_logprobs, prompts[0], expected(model, prompts[0]), 0)
    assert other.prompt_logprobs is None
    assert one.outputs[0].token_ids == one.outputs[1].token_ids
    assert all(len(output.logprobs) == 3 for output in one.outputs)
    llm.engine.check()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_with_drafts(tiny, family: str):
    folder, model = tiny(family)
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_batched_tokens=48, speculative_config=DRAFTS)
    ids = tokens("a", 20) * 4
    [result] = llm.generate([{"prompt_token_ids": ids}], GREEDY)
    assert_scores(result.prompt_logprobs, ids, expected(model, ids), 4)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_preempted_prompt_is_scored_whole(tiny, steps: int):
    """Released in the midst of its prompt, or behind it, and run again."""
    folder, model = tiny("llama")
    engine = engine_of(folder, max_num_batched_tokens=40)
    request = ask("a", tokens("a", 100), 5)
    engine.submit(replace(request, params=replace(request.params, prompt_logprobs=1)))
    events = [event for _ in range(steps) for event in engine.step()]
    [job] = engine.scheduler.running
    assert bool(events) == (steps == 4) == (job.committed >= 100)
    while engine.in_flight:
        events += engine.scheduler.commit(engine.in_flight.popleft(), engine.runner.result())
    engine.scheduler._preempt(job)
    while engine.has_work():
        events += engine.step()
    assert engine.stats().preemptions == 1
    first, *others = events
    assert_scores([None, *first.prompt_logprobs], request.prompt_ids, expected(model, request.prompt_ids), 1)
    assert all(event.prompt_logprobs is None for event in others)
    assert sum(len(event.token_ids) for event in events) == 5
    engine.check()


def test_a_model_whose_last_layers_share_keys_refuses(tiny):
    engine = engine_of(tiny("gemma4_e")[0])
    request = ask("x", tokens("x", 9), 1)
    with pytest.raises(RequestError, match="prompt_logprobs is not supported for this model"):
        engine.submit(replace(request, params=replace(request.params, prompt_logprobs=1)))
    assert run(engine, [request])["x"].ended == "length"
