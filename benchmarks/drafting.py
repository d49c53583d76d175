"""Tokens per second with and without drafts, on a text to copy and on free text.

    python benchmarks/drafting.py MODEL [--config '{"method": "ngram", ...}' ...] [--rounds 3]

All configurations take turns in one run, one sequence at a time; a figure is the best of its rounds. Answers must be
the same for all.
"""

from __future__ import annotations

import argparse
import time

from offroad import LLM, SamplingParams

PARAGRAPH = (
    "The night train left the harbour at ten past nine. In the third carriage sat a woman with a green suitcase, who "
    "had told nobody where she was going. At Milton Road two musicians got on, and one of them began to tune a violin. "
    "The guard, Mr. Abernathy, asked for tickets twice and forgot both times to punch them."
)
TASKS = {
    "copying": f"Repeat this text exactly, word for word.\n\n{PARAGRAPH}\n\nAgain:\n\n{PARAGRAPH}\n\nAgain:\n\n",
    "free text": "Write a long letter to a friend about a summer by the sea, the people whom you met and what you ate.",
}
DEFAULT = [
    "",
    '{"method": "ngram", "num_speculative_tokens": 4}',
    '{"method": "ngram", "num_speculative_tokens": "auto"}',
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--config", action="append", help="a --speculative-config; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    configs = args.config or DEFAULT
    values = dict(device="auto", max_num_seqs=1, max_model_len=1024, enable_prefix_caching=False)
    engines = [LLM(args.model, speculative_config=config, **values) for config in configs]
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
    print("| task | drafts | tok/s | of the first | accepted of drafted |")
    print("|---|---|---|---|---|")
    for task, prompt in TASKS.items():
        best, answers, counts = [0.0] * len(engines), [], [(0, 0)] * len(engines)
        for _ in range(args.rounds):
            for i, llm in enumerate(engines):
                began = time.perf_counter()
                [result] = llm.generate(prompt, params)
                usage = result.usage
                seconds = time.perf_counter() - began - usage.time_to_first_token
                best[i] = max(best[i], (usage.completion_tokens - 1) / seconds)
                counts[i] = usage.accepted_drafts, usage.drafts
                answers.append(result.outputs[0].token_ids)
        assert all(answer == answers[0] for answer in answers), "drafts changed an answer"
        for config, rate, (accepted, drafted) in zip(configs, best, counts, strict=True):
            print(f"| {task} | {config or 'none'} | {rate:.1f} | x {rate / best[0]:.2f} | {accepted} of {drafted} |")


if __name__ == "__main__":
    main()
