"""How often a draft is accepted at temperature 1.0: by the rule that keeps the answer, and by the classic one.

    python benchmarks/acceptance.py MODEL DRAFTER --text FILE

MODEL and DRAFTER are checkpoints with one vocabulary, e.g. a model and its copy by `offroad quantize`. For every
position of the text both give a distribution, p and q. Classic rejection accepts a draft with probability
sum(min(p, q)), the most that any rule can. offroad draws draft and token with the same noise, so that an answer is the
one without drafts: it accepts where both draws agree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from offroad import LLM
from offroad.evidence.quality import log_probabilities


def logprobs_of(
    model: str, ids: list[list[int]] | None, text: str, segment: int
) -> tuple[torch.Tensor, list[list[int]]]:
    llm = LLM(model, device="cpu", max_num_seqs=1, max_model_len=1024, max_num_batched_tokens=segment)
    if ids is None:
        whole = llm.tokenizer.encode(text)
        ids = [whole[i : i + segment] for i in range(0, len(whole), segment)]
    return torch.cat([log_probabilities(llm.engine, part) for part in ids]), ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--draws", type=int, default=8, help="noise drawn for each position")
    args = parser.parse_args()
    p, ids = logprobs_of(args.model, None, args.text.read_text(), args.segment)
    q, _ = logprobs_of(args.drafter, ids, "", args.segment)
    classic = torch.minimum(p.exp(), q.exp()).sum(-1)
    torch.manual_seed(0)
    agree = torch.zeros(len(p))
    for _ in range(args.draws):
        noise = -torch.empty_like(p).exponential_().log()  # Gumbel, the same for both
        agree += (p + noise).argmax(-1) == (q + noise).argmax(-1)
    coupled = agree / args.draws
    print(f"positions {len(p)}, temperature 1.0")
    print("| rule | first draft accepted | tokens a step with 3 drafts |")
    print("|---|---|---|")
    for name, chance in (("classic rejection", classic), ("same noise (offroad)", coupled)):
        rate = chance.mean().item()
        print(f"| {name} | {rate:.3f} | {1 + rate + rate**2 + rate**3:.2f} |")


if __name__ == "__main__":
    main()
