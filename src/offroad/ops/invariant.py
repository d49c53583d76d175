"""What `--batch-invariant` asks for besides kernels that keep rows apart (`invariant` in `ops/spec.py`)."""

from __future__ import annotations

from offroad.errors import PlanError
from offroad.settings import Settings


def invariant_notes(settings: Settings, block: int, k: int) -> list[str]:
    """What --batch-invariant changes besides kernels. Raises PlanError where a chunk might wait for ever."""
    if not settings.batch_invariant:
        return []
    least = block + settings.max_num_seqs * (k + 1)
    if settings.max_num_batched_tokens < least:
        raise PlanError(
            "--max-num-batched-tokens with --batch-invariant",
            found=settings.max_num_batched_tokens,
            accepted=f"{least} or more: a block of {block} tokens, and {k + 1} of each sequence",
            next="raise it, or lower --max-num-seqs",
        )
    return [
        "batch invariant: a request's tokens and log-probabilities are bit for bit those of the request alone; prompts "
        "are cut between blocks, blocks of generated tokens are not shared, and a request waits for room for all its "
        "tokens"
    ]
