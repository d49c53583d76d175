"""--batch-invariant on a GPU: tokens and log-probabilities of a request alone, bit for bit, among 64 and in chunks.

Run with -s to see what it costs on these tiny models; the cost on real shapes is the bench's with and without the flag.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from tiny_models import write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LENGTHS = (1, 17, 64, 130, 200)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


def requests(count: int) -> tuple[list[dict], list[SamplingParams]]:
    dice = random.Random(count)
    shared = [dice.randrange(3, 290) for _ in range(150)]
    prompts = [
        shared[: dice.choice((0, 0, 64, 150))]
        + [dice.randrange(3, 290) for _ in range(dice.choice((1, 17, 64, 130, 200)))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(temperature=i % 3 * 0.4, seed=i, max_tokens=24, ignore_eos=True, logprobs=3)
        for i in range(count)
    ]
    return [{"prompt_token_ids": ids} for ids in prompts], params


def answers(llm: LLM, prompts: list[dict], params: list[SamplingParams]) -> list[tuple]:
    """Tokens, and log-probabilities to their last bit."""
    found = llm.generate(prompts, params)
    return [(r.outputs[0].token_ids, [repr(entry) for entry in r.outputs[0].logprobs]) for r in found]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "qwen3_5_moe", "gemma4_e"])
def test_among_others_and_in_chunks(family: str, dtype: str, tmp_path: Path):
    write_tiny(family, tmp_path)
    settings = dict(device="cuda", dtype=dtype, memory_utilization=0.06, batch_invariant=True)
    prompts, params = requests(64)
    alone = LLM(str(tmp_path), **settings, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=512)
    expected = [answers(alone, [p], [s])[0] for p, s in zip(prompts[:16], params[:16], strict=True)]
    for changes in (
        dict(max_num_batched_tokens=4096),
        dict(max_num_batched_tokens=192),
        dict(max_num_batched_tokens=1024, enforce_eager=True),
        dict(max_num_batched_tokens=1024, speculative_config=DRAFTS),
    ):
        together = LLM(str(tmp_path), **settings, max_num_seqs=64, **changes)
        for turn in range(2):  # cold, then with the prefixes of the first
            began = time.perf_counter()
            found = answers(together, prompts, params)
            print(family, dtype, changes, turn, f"{time.perf_counter() - began:.2f} s")
            assert [f[0] for f in found[:16]] == [e[0] for e in expected], (changes, turn)
            assert found[:16] == expected, (changes, turn)
        together.engine.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (66, 2560), (1, 2048), (12288, 5120)])
def test_dense_linears(n: int, k: int, dtype: str):
    """The kernel that stands in for torch's GEMM: bits of a row in every batch, and the product itself."""
    from offroad.device.probe import probe

    kind = getattr(torch, dtype)
    torch.manual_seed(n)
    weight = Packed("dense", n, k, {"w": (torch.randn(n, k, device="cuda") / k**0.5).to(kind)})
    x = torch.randn(300, k, device="cuda").to(kind)
    problem = Problem("linear", "decode", dtype, sizes=(("k", k), ("n", n)), stored=("bf16",), invariant=True)
    run = default_registry().kernels["triton.linear_invariant"].prepare(probe("auto"), problem)
    alone = run(x[:1], weight)
    for rows in (2, 8, 16, 17, 64, 65, 300):
        for place in (0, rows - 1):
            others = x[:rows].roll(1, 0) if place == 0 else x[:rows].clone()
            others[place] = x[0]
            assert torch.equal(run(others, weight)[place], alone[0]), (rows, place)
    expected = (x.double() @ weight.tensors["w"].double().T).float()
    bound = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-4}[dtype]
    torch.testing.assert_close(run(x, weight).float(), expected, atol=bound, rtol=bound)
