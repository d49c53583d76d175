"""A drafter that eats hidden states, behind graphs: the same answers and the same drafts as behind eager steps."""

from __future__ import annotations

import json
import random
from functools import partial

from mtp_files import with_drafter

from offroad import LLM, SamplingParams
from offroad.ops.capture import GraphPlan
from offroad.run.chunk_graphs import ChunkGraphs
from offroad.run.graphs import Graphs

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_graphs_give_the_drafts_of_eager_steps(tiny, tmp_path):
    folder, _ = tiny("qwen3_5")
    with_drafter(folder, tmp_path / "mtp", "qwen3_5")
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 290) for _ in range(n)]} for n in (1, 40, 64)]
    found = []
    for graphs in (False, True):
        config = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
        llm = LLM(str(tmp_path / "mtp"), device="cpu", dtype="float32", max_num_seqs=4, speculative_config=config)
        runner, replays, chunks = llm.engine.runner, [], []
        if graphs:

            def record(body, replays=replays):
                return lambda: (replays.append(1), body())

            plan = GraphPlan((2, 4), (1, 3), "")
            parts = runner.model, runner.ops["prefill"], runner.arrays
            runner.chunk_graphs = ChunkGraphs((16, 64, 80), *parts, partial(record, replays=chunks))
            runner.graphs = Graphs(plan, runner.model, runner.ops["decode"], runner.arrays, record)
        results = llm.generate(prompts, GREEDY)
        for prompt in prompts:  # alone, then what follows the answer: the drafter resumes too
            prompt = {"prompt_token_ids": prompt["prompt_token_ids"] * 2}
            results += llm.generate([prompt], GREEDY)
            prompt["prompt_token_ids"] += [*results[-1].outputs[0].token_ids, 5, 6, 7]
            results += llm.generate([prompt], GREEDY)
        stats = llm.engine.stats()
        found.append(([r.outputs[0].token_ids for r in results], stats.draft_tokens, stats.accepted_draft_tokens))
        assert (len(replays) > 5) == graphs
        assert (len(chunks) >= 6) == graphs
        llm.engine.check()
        llm.close()
    assert found[0] == found[1]
    assert found[0][1] > 0
