"""No kernel is compiled after an engine is ready, whatever is asked of it; run with -s to see what prepare took."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "speculate"))
from tiny_models import write_tiny  # noqa: E402

from offroad.engine import Engine  # noqa: E402
from offroad.sample.params import SamplingParams  # noqa: E402
from offroad.schedule.request import Request  # noqa: E402
from offroad.settings import Settings  # noqa: E402
from offroad.triton_kernels.memory import MEMORY  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 129, 200)
SAMPLING = (
    dict(temperature=0.0),
    dict(temperature=0.8),
    dict(temperature=0.8, top_k=20, top_p=0.9),
    dict(temperature=0.7, min_p=0.1, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1),
    dict(temperature=1.0, logprobs=3, min_tokens=2),
    dict(temperature=0.5, logit_bias={5: 3.0}),
)


def serve(engine: Engine, requests: int, seed: int) -> int:
    """Prompts of many lengths in waves of 1 to 9 requests, some of them aborted; how many tokens came."""
    source, came = random.Random(seed), 0
    waiting = [
        Request(
            id=f"{seed}-{i}",
            prompt_ids=[source.randrange(3, 290) for _ in range(source.choice(LENGTHS))],
            params=SamplingParams(max_tokens=source.randrange(2, 24), ignore_eos=True, **SAMPLING[i % len(SAMPLING)]),
            seed=i,
        )
        for i in range(requests)
    ]
    while waiting:
        wave = [waiting.pop() for _ in range(min(len(waiting), source.randint(1, 9)))]
        for request in wave:
            engine.submit(request)
        steps = 0
        while engine.has_work():
            came += len(engine.step())
            steps += 1
            if steps == 6:
                engine.abort(wave[0].id)
    return came


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "qwen3_5_moe", "gemma4_e"])
def test_requests_compile_nothing(family: str, drafts: bool, tmp_path: Path):
    write_tiny(family, tmp_path)
    more = dict(speculative_config=NGRAM) if drafts else {}
    for eager in (False, True):
        settings = Settings.of(
            model=str(tmp_path), device="cuda", dtype="bfloat16", max_num_seqs=9, max_num_batched_tokens=192,
            memory_utilization=0.06, enforce_eager=eager, **more,
        )  # fmt: skip
        MEMORY.most.clear()
        engine = Engine(settings)
        assert engine.runner.compiled
        print(family, drafts, eager, engine.runner.compiled, f"ready in {engine.info.load_seconds:.1f} s")
        before = engine.stats().late_compilations
        assert serve(engine, 40, 1 + eager) > 300
        engine.check()
        assert engine.stats().late_compilations == before
        assert MEMORY.most[torch.device("cuda", 0)] <= engine.plan.memory.workspaces.kept
        engine.close()
