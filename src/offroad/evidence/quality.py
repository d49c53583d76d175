"""How well a model predicts a text, to compare ways of storing it: perplexity, and divergence from another model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from offroad.engine import Engine
from offroad.schedule.step import Kind, Step, Table, Want

SLOT = 1


@torch.inference_mode()
def log_probabilities(engine: Engine, ids: list[int]) -> torch.Tensor:
    """What the model gives each next token, fp32 [len(ids), vocab], for ids that fit in one chunk.

    The engine must be idle, and forgets its cached prefixes: the step writes to blocks that may hold them.
    """
    assert not engine.has_work(), "an engine that is idle"
    assert len(ids) <= engine.plan.chunk, (len(ids), engine.plan.chunk)
    runner = engine.runner
    arrays = runner.arrays
    arrays.tokens[SLOT, : len(ids)] = torch.tensor(ids, device=arrays.device)
    arrays.length[SLOT] = 0
    engine.reset_prefix_cache()
    columns = -(-len(ids) // engine.plan.block)
    memory = engine.plan.memory
    for table, blocks in ((Table.HISTORY, memory.history_blocks), (Table.WINDOW, memory.window_blocks)):
        assert not blocks or columns < blocks, (columns, blocks)
        arrays.tables[table][SLOT, :columns] = torch.arange(1, columns + 1, dtype=torch.int32)
    step = Step(
        number=0,
        slot=np.array([SLOT], np.int32),
        kind=np.array([Kind.CHUNK], np.uint8),
        width=np.array([len(ids)], np.int32),
        wants=np.array([Want.SAMPLE], np.uint8),
    )
    rows = arrays.rows(step)
    every = torch.arange(len(ids), device=arrays.device)
    rows = replace(rows, wanted=every, wanted_width=np.array([len(ids)], np.int32))
    ops = runner.ops["prefill"]
    return ops.logits(runner.model.forward(rows, ops)).log_softmax(-1)


@dataclass(frozen=True)
class Quality:
    """`perplexity` over `tokens` predicted ones; `divergence`: mean Kullback-Leibler distance from the baseline in nats
    a token, None without one."""

    tokens: int
    perplexity: float
    divergence: float | None = None


def quality(engine: Engine, ids: list[int], segment: int = 256, baseline: Engine | None = None) -> Quality:
    """Over segments of the text that each begin anew, so that no cache has a part in it."""
    total, distance, count = 0.0, 0.0, 0
    for first in range(0, len(ids) - 1, segment):
        part = ids[first : first + segment + 1]
        ours = log_probabilities(engine, part[:-1])
        following = torch.tensor(part[1:], device=ours.device)
        total -= ours.gather(1, following[:, None]).sum().item()
        count += len(following)
        if baseline is not None:
            theirs = log_probabilities(baseline, part[:-1]).to(ours.device)
            distance += (theirs.exp() * (theirs - ours)).sum().item()
    return Quality(count, float(np.exp(total / count)), None if baseline is None else distance / count)
