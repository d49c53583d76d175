"""Greedy text of a real model on one device beside that of another: 10 prompts, 48 tokens each.

    PYTHONPATH=src python tests/gpu/real_weights.py MODEL.gguf --device cpu --write FILE.json
    PYTHONPATH=src python tests/gpu/real_weights.py MODEL.gguf --device cuda --dtype float32 --compare FILE.json
    PYTHONPATH=src python tests/gpu/real_weights.py MODEL.gguf --device v100-32gb --compare FILE.json

The texts must be equal. Where they part, both tokens must have been nearly as likely to the device that wrote the file:
the gap of their log-probabilities there is below what the type's rounding comes to (`TIE`). Besides, the other
device's text is read as a prompt, and the log-probability of each of its tokens compared, so that all 480 places count
whether or not the texts parted: their mean difference must be below `TIE` too. MODEL may be a demo name. The exit code
is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from offroad import LLM, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Explain gravity to a child.",
    "def fibonacci(n):",
    "Once upon a time",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,",
    "1 + 1 =",
    "Zwölf Boxkämpfer jagen",
    "SELECT name FROM users WHERE",
    "To boil an egg, first fill a pot with water. " * 12 + "Then",
]
TOKENS, TOP = 48, 8
TIE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.25}  # nats; bf16 keeps 8 bits of logits of about 20


def answers(llm: LLM) -> list[dict[str, Any]]:
    """Prompt, tokens and text of each answer, and at each token the log-probabilities of the likeliest."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP)
    return [
        {
            "prompt": result.prompt_token_ids,
            "tokens": result.outputs[0].token_ids,
            "text": result.outputs[0].text,
            "chosen": [entry.logprob for entry in result.outputs[0].logprobs or ()],
            "top": [dict(entry.top) for entry in result.outputs[0].logprobs or ()],
        }
        for result in llm.generate(PROMPTS, params)
    ]


def parted(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[int, float] | None:
    """Where two answers part, and the gap between both tokens there to the writer; None: they are the same. A token
    that was not among the writer's likeliest is as far as the last of these at least."""
    pairs = zip(found["tokens"], wanted["tokens"], strict=True)
    place = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if place is None:
        return None
    top = {int(token): value for token, value in wanted["top"][place].items()}
    return place, wanted["chosen"][place] - top.get(found["tokens"][place], min(top.values()) - 1.0)


def differences(llm: LLM, wanted: list[dict[str, Any]]) -> list[float]:
    """|difference| of the log-probability of every token of the other device's answers."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": answer["prompt"] + answer["tokens"]} for answer in wanted]
    found = []
    for result, answer in zip(llm.generate(prompts, params), wanted, strict=True):
        scored = (result.prompt_logprobs or [])[len(answer["prompt"]) :]
        found += [abs(e.logprob - t) for e, t in zip(scored, answer["chosen"], strict=True) if e is not None]
    return found


def compare(llm: LLM, found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[list[str], str]:
    """(what failed, figures)."""
    tie, failures, ties = TIE[llm.engine.plan.dtype], [], 0
    for mine, theirs in zip(found, wanted, strict=True):
        if mine["prompt"] != theirs["prompt"]:
            failures.append(f"another prompt: {mine['prompt'][:8]}, not {theirs['prompt'][:8]}")
        elif (part := parted(mine, theirs)) is not None:
            ties += part[1] <= tie
            told = f"parts at token {part[0]}, where the gap is {part[1]:.4f} (a tie: up to {tie})"
            print(f"  {told}\n    {mine['text']!r}\n    {theirs['text']!r}")
            failures += [told] if part[1] > tie else []
    apart = differences(llm, wanted)
    mean, most = sum(apart) / len(apart), max(apart)
    if mean > tie:
        failures.append(f"log-probabilities are {mean:.4f} apart on average")
    same = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in zip(found, wanted, strict=True))
    figures = f"{same} of {len(wanted)} texts equal, {ties} part at a tie; log-probabilities of {len(apart)} tokens "
    return failures, figures + f"{mean:.5f} apart on average, {most:.4f} at most"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--memory-utilization", type=float, default=0.1)
    args = parser.parse_args()
    began = time.perf_counter()
    values = dict(max_model_len=1024, max_num_seqs=len(PROMPTS), enable_prefix_caching=False)
    if args.device != "cpu":
        values["memory_utilization"] = args.memory_utilization
    llm = LLM(args.model, device=args.device, dtype=args.dtype, **values)
    found, failures, figures = answers(llm), [], "written"
    if args.write:
        args.write.write_text(json.dumps(found))
    if args.compare:
        failures, figures = compare(llm, found, json.loads(args.compare.read_text()))
    for failure in failures:
        print(f"FAILED {failure}")
    what = f"{Path(args.model).name} on {llm.engine.info.device} ({llm.engine.plan.dtype})"
    seconds = time.perf_counter() - began
    print(f"real weights {'FAILED' if failures else 'passed'}: {what}: {figures}; {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
