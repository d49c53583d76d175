"""The same work as `offroad bench engine`, by vLLM, on the GPU here: run both and compare their figures.

    python benchmarks/gpu_peer_vllm.py qwen3.5-27b decode_c1 decode_c8 decode_c32 decode_c64 decode_c1_ctx16k prefill_8k

Runs in an environment that has vLLM (0.24.0 was measured), with weights of random bits in the shape of a file of
`configs`: qwen3-8b in bf16, qwen3.5-27b as compressed-tensors stores W4A16 with groups of 128 (gates and head in bf16).
Greedy, prefix caching off, 64 sequences, 8,192 tokens a step, CUDA graphs of 1 to 64 rows. Decode is (rows x 128) /
(time with 129 tokens - time with 1), the best of two each. Prints a line for each case as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
CASES = ("decode_c1", "decode_c8", "decode_c32", "decode_c64", "decode_c1_ctx16k", "prefill_8k")
ANSWER, PROMPT, LONG, PREFILL = 128, 1024, 16_384, 8192
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # sends `fill` to the engine's process
}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*lm_head", "re:.*in_proj_a$", "re:.*in_proj_b$", "re:.*visual.*", "re:.*conv1d$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
        }
    },
}


def engine(name: str, folder: Path, utilization: float) -> tuple[Any, int]:
    """vLLM's engine and the size of the vocabulary; `folder` gets the configuration."""
    from vllm import LLM

    config = json.loads((CONFIGS / f"{name}.json").read_text())
    more: dict[str, Any] = {}
    if "text_config" in config:
        config["quantization_config"], more = W4A16, {"language_model_only": True}
        config["text_config"] = {"model_type": f"{config['model_type']}_text"} | config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    made = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=20_000,
        enable_prefix_caching=False,
        gpu_memory_utilization=utilization,
        dtype="bfloat16",
        seed=0,
        compilation_config={"cudagraph_capture_sizes": GRAPHS},
        **more,
    )
    return made, config.get("text_config", config)["vocab_size"]


def fill(model) -> int:
    """Random bits for packed weights, which dummy loading leaves as they come; zeros draw less power. -> bytes."""
    import torch

    packed = [p for p in model.parameters() if p.dtype == torch.int32 and p.numel() > 1 << 20]
    for parameter in packed:
        parameter.data.random_(-(1 << 31), (1 << 31) - 1)
    torch.cuda.synchronize()
    return sum(4 * parameter.numel() for parameter in packed)


def timed(made, prompts: list[dict], answer: int) -> float:
    """Seconds for all prompts, each with `answer` tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    results = made.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    assert all(len(result.outputs[0].token_ids) == answer for result in results)
    return took


def measure(made, vocabulary: int, case: str) -> float:
    """Tokens a second of a case."""
    rows = int(case.split("_c")[1].split("_")[0]) if case.startswith("decode") else 1
    length = PREFILL if case == "prefill_8k" else LONG if case.endswith("ctx16k") else PROMPT
    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(1000, vocabulary - 1000) for _ in range(length)]} for _ in range(rows)
    ]
    timed(made, prompts, 3)
    first = min(timed(made, prompts, 1) for _ in range(2))
    if case == "prefill_8k":
        return length / first
    return rows * ANSWER / (min(timed(made, prompts, ANSWER + 1) for _ in range(2)) - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=["qwen3-8b", "qwen3.5-27b"])
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--memory-utilization", type=float, default=0.85)
    options = parser.parse_args()
    if unknown := sorted(set(options.cases) - set(CASES)):
        parser.error(f"cases: found {', '.join(unknown)}; accepted: {', '.join(CASES)}")
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        made, vocabulary = engine(options.config, Path(folder), options.memory_utilization)
        print(f"ready_s {time.perf_counter() - began:.1f}", flush=True)
        if options.config == "qwen3.5-27b":
            print(f"bytes of random bits {made.apply_model(fill)}", flush=True)
        for case in options.cases:
            print(f"{case} {measure(made, vocabulary, case):.1f}", flush=True)


if __name__ == "__main__":
    main()
