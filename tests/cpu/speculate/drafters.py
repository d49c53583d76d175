"""Drafters that are checkpoints of their own, and what a test looks at while they run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from offroad import LLM, SamplingParams
from offroad.run.arrays import Arrays
from offroad.run.rows import PagedView, ReplayView, RingView, View


def like(folder: Path, to: Path, noise: float, scale: float = 1.0) -> Path:
    """A copy of a checkpoint that thinks nearly alike: its matrices are scaled, with some noise on them."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim > 1:
            spread = noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor * scale + spread).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def edited(folder: Path, to: Path, **config) -> Path:
    """A copy of a checkpoint with some fields of its config replaced."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


def without(folder: Path, to: Path, name: str) -> Path:
    """A copy of a checkpoint that lacks a tensor."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    del tensors[name]
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def engine(folder: Path, method: str = "", drafter: Path | None = None, tokens: int | str = 3, **settings) -> LLM:
    """The model of a folder with a drafter, or without."""
    chosen = {"method": method, "model": str(drafter), "num_speculative_tokens": tokens}
    values = dict(device="cpu", dtype="float32", threads=1, max_num_seqs=4, max_num_batched_tokens=48)
    values["max_model_len"] = 256
    return LLM(str(folder), speculative_config=json.dumps(chosen) if method else "", **values | settings)


def tight(folder: Path, method: str, drafter: Path, **settings) -> LLM:
    """The same with 5 blocks of history, and 4 checkpoints if there are rings."""
    memory = engine(folder, method, drafter, **settings).engine.plan.memory
    kept = 4 * memory.checkpoint_bytes
    nbytes = 6 * memory.history_block_bytes + memory.window_blocks * memory.window_block_bytes + kept
    settings |= dict(kv_cache_memory_bytes=nbytes, checkpoint_memory_bytes=kept)
    return engine(folder, method, drafter, **settings)


def prompts(sizes: tuple[int, ...] = (1, 63, 65, 100)) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 290) for _ in range(n)] for n in sizes]


def answers(llm: LLM, params: SamplingParams, listed: list[list[int]] | None = None) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in listed or prompts()], params)
    llm.engine.check()
    assert [result.outputs[0].error for result in found] == [None] * len(found)
    return [result.outputs[0].token_ids for result in found]


def _planes(view: View) -> tuple[torch.Tensor, ...]:
    if isinstance(view, ReplayView):
        return view.state, view.key, view.delta, view.decay
    return (view.data,) if isinstance(view, RingView) else (view.k, view.v)


def spoil(llm: LLM) -> None:
    """What no sequence has written must never be read: pages, rings and checkpoints hold NaN before anything runs."""
    arrays = llm.engine.runner.arrays
    for view in (view for views in arrays.views for view in views.values()):
        for plane in _planes(view):
            plane.fill_(torch.nan)
    for _, kept in arrays.checkpoints:
        kept.fill_(torch.nan)


def stored(arrays: Arrays, layers: range, slot: int, length: int, back: dict[str, int]) -> dict[str, torch.Tensor]:
    """What the layers hold of a slot's tokens [0, length) that a later token can see, by layer and item; of rings the
    last rows, as many as `back` says by item."""
    found = {}
    for number, layer in enumerate(layers):
        for name, view in arrays.views[layer].items():
            if isinstance(view, RingView):
                at = torch.arange(max(0, length - back[name]), length) % view.capacity
                found[f"{number}.{name}"] = view.data[slot, at].clone()
            elif isinstance(view, PagedView) and view.writable:
                at = torch.arange(max(0, length + 1 - view.window) if view.window else 0, length)
                blocks = view.table[slot, at // view.block].long()
                assert (blocks > 0).all(), "a row that a token can see lies in the bin"
                found[f"{number}.{name}.k"] = view.k[blocks, at % view.block].clone()
                found[f"{number}.{name}.v"] = view.v[blocks, at % view.block].clone()
    return found
