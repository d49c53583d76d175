"""Log-probabilities of a prompt's own tokens, from the hidden states of the chunks that run it."""

from __future__ import annotations

import numpy as np

from offroad.run.arrays import Arrays
from offroad.run.graphs import Forward
from offroad.sample.logprobs import prompt_logprobs
from offroad.schedule.step import PromptLogprobs, Step

SCORED = 32  # tokens at once: bounds the memory of logits, which the plan has counted for sampled tokens only


def score_prompts(step: Step, ran: Forward, arrays: Arrays) -> dict[int, PromptLogprobs]:
    """By row of `step` with Want.PROMPT, whose `ran.states` are those of all tokens. Waits for the device."""
    rows, samples = ran.rows, step.samples
    found = {}
    for row in np.flatnonzero(step.scores).tolist():
        first, slot = int(rows.start[row]) + 1, int(rows.slot[row])
        count, offset = int(rows.width[row]) - int(samples[row]), int(rows.offset[row])
        parts = []
        for at in range(0, count, SCORED):
            size = min(SCORED, count - at)
            logits = ran.ops.logits(ran.states[offset + at : offset + at + size])
            parts.append(prompt_logprobs(logits, arrays.tokens[slot, first + at : first + at + size]))
        if parts:
            names = ("chosen", "ranks", "top_ids", "top")
            found[row] = PromptLogprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    return found
