"""Log-probabilities of prompts on a CUDA device: those of the CPU, through the chunks that the device runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from engine_runs import tokens  # noqa: E402
from tiny_models import write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ASKED = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma4"])
def test_the_same_scores(tmp_path, family: str):
    write_tiny(family, tmp_path)
    prompts = [{"prompt_token_ids": tokens(name, count)} for name, count in (("a", 140), ("b", 33), ("c", 2))]
    found = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        more = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "allow_reference": device == "cuda"}
        llm = LLM(str(tmp_path), device=device, dtype=dtype, **more)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))  # they lie in the prefix cache then
        found.append([result.prompt_logprobs for result in llm.generate(prompts, ASKED)])
        llm.engine.check()
        llm.close()
    for cpu, cuda in zip(*found, strict=True):
        assert cpu[0] is cuda[0] is None
        assert len(cpu) == len(cuda)
        for one, other in zip(cpu[1:], cuda[1:], strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=0.25)  # bfloat16
            assert len(other.top) == 2
