"""Plans of the hybrid families in their usual formats, for five GPUs that are not here, from config files alone.

Rewrite the goldens with scripts/write_goldens.py and review them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from offroad.engine import make_plan
from offroad.errors import OffroadError
from offroad.ops.plan import Plan
from offroad.settings import Settings
from offroad.weights.locate import open_path

CONFIGS = Path(__file__).parent / "configs"
BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "configs"
GOLDEN = Path(__file__).parent / "golden" / "families"
GPUS = ("v100-32gb", "rtx5090", "rtxpro6000", "gb10", "h100-80gb")
FILES = {
    "qwen3_5-27b-w4a16": BENCHMARKS / "qwen3.5-27b.json",
    "qwen3_5-35b-a3b-fp8": BENCHMARKS / "qwen3.5-35b-a3b.json",
    "gemma4-31b-w4a16": BENCHMARKS / "gemma-4-31b.json",
    "gemma4-e4b-bf16": BENCHMARKS / "gemma-4-e4b.json",
} | {path.stem: path for path in CONFIGS.glob("*.json")}
MODELS = tuple(sorted(FILES))
MIB = 1024**2


def make(model: str, device: str, **settings) -> Plan:
    wanted = Settings.of(model=model, device=device, allow_reference=True, kv_cache_dtype="fp8", **settings)
    return make_plan(wanted, open_path(FILES[model]))


def golden(model: str, device: str) -> str:
    """The plan's text for 4 sequences, on two GPUs where people have two; or why there is none."""
    try:
        made = make(model, device, max_num_seqs=4, tensor_parallel_size=2 if device == "v100-32gb" else 1)
        return made.explain() + "\n"
    except OffroadError as error:
        return f"{error}\n"


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_golden_plan(device: str, model: str):
    assert golden(model, device) == (GOLDEN / f"{device}.{model}.txt").read_text()


@pytest.mark.parametrize(
    ("model", "kv", "window", "state"),
    [
        ("qwen3_5-27b-w4a16", 65_536, 0, 48 * (48 * 128 * 128 * 4 + 4 * 10_240 * 2 + 9 * (64 * 128 + 48) * 4)),
        ("qwen3_5-35b-a3b-fp8", 20_480, 0, 30 * (32 * 128 * 128 * 4 + 4 * 8_192 * 2 + 9 * (48 * 128 + 32) * 4)),
        ("gemma4-31b-w4a16", 80 * 1024, 800 * MIB, 0),
        ("gemma4-26b-a4b-nvfp4", 20 * 1024, 200 * MIB, 0),
        ("gemma4-e4b-bf16", 16 * 1024, 20 * MIB, 0),
    ],
)
def test_bytes_that_a_sequence_takes(model: str, kv: int, window: int, state: int):
    """By hand, in bf16. 27B: 16 full layers x 2 x 4 heads x 256, 48 states of 48 x 128 x 128 fp32, 4 columns of 10,240
    and 9 records of (16 + 48) x 128 + 48 in fp32; 35B: 30 of 32 heads. 31B: 10 full layers x 2 x 4 x 512, 50 windows of
    1,024 x 2 x 16 x 256."""
    wanted = Settings.of(model=model, device="rtxpro6000", allow_reference=True, max_model_len=4096, max_num_seqs=2)
    made = make_plan(wanted, open_path(FILES[model]))
    assert (made.kv_bytes_per_token, made.window_bytes, made.state_bytes) == (kv, window, state)
    text = made.explain()
    assert f"{kv:,} B a token growing, {window:,} B of windows and {state:,} B of state a sequence" in text
    # The pool has whole blocks, two windows a sequence: what is being left and what is being filled.
    memory = made.memory
    assert memory.window_blocks * memory.window_block_bytes >= 2 * 2 * window
    assert memory.slots * memory.slot_bytes == 3 * state


def test_ways_out_are_named():
    text = golden("deepseek-v4-flash", "h100-80gb")
    assert "no kernel for 856 cells" in text
    assert "2,4,..42        index_select.decode" in text
    assert "choose another model" in text
