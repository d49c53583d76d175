"""Nothing compiles during a request: whatever steps launch has been collected before, and is compiled once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offroad.run.prompt import SCORED
from offroad.run.rows import RingView
from offroad.run.warm import Twins, counts

pytest.importorskip("triton")
STEPS = 12
MODELS = [
    "qwen3 invariant",
    "qwen3 drafts",
    "qwen3 w8a8",
    "qwen3.5",
    "moe",
    "gemma e",
    "qwen3 hopper",
    "qwen3.5 hopper",
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """All cases of the script, by one process: Triton was told to interpret in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("warm_script.py")
    names = [*MODELS, "compiled"]
    command = [sys.executable, str(script), str(STEPS), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(names, lines, strict=True)) | {"stderr": {"text": done.stderr}}


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_any_rows_launch_what_was_collected(answers: dict[str, dict], name: str):
    found = answers[name]
    assert found["missing"] == []
    assert found["asked"] > 10
    assert set(found["scored"]) >= set(range(1, SCORED + 1))  # a prompt's tokens, however few sequences there may be
    # The linears' tiles: there was something to find, but where one is for all, or another kernel for 17 to 64 tokens.
    widths = {"qwen3 invariant": ["64"], "qwen3.5 hopper": ["16", "64"]}
    widths |= dict.fromkeys(("qwen3 hopper", "qwen3 w8a8"), ["16", "64"])
    assert found["widths"] == widths.get(name, ["16", "32", "64"])
    gate = "gelu_tanh" if "gemma" in name else "silu"  # behind the linears' sums, in a kernel of its own
    # Triton's kernels have it from 17 tokens on for 4 bits, which are Hopper's there, for 8 bits from one.
    apart = name in ("qwen3 invariant", "qwen3.5 hopper")
    assert found["gates"] == ([] if apart else [gate])
    assert found["unused"] < 0.3 * found["prepared"]  # nor is time spent on what nothing launches


@pytest.mark.parametrize("name", MODELS)
def test_kernels_share_what_was_planned(answers: dict[str, dict], name: str):
    """Steps of as many tokens as a plan allows dequantise weights, the largest piece of which is what is asked for and,
    beside parts of sums of the largest shapes, what is planned; rows that are kept apart are cut into as many as have
    room, and operands of products in e4m3 are planned as they are."""
    asked, planned, piece, least = answers[name]["shared"]
    assert 0 < asked <= planned
    if "invariant" not in name and "w8a8" not in name:
        assert (asked, planned) == (piece, max(piece, least))


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_was_planned(answers: dict[str, dict], name: str):
    made, planned = answers[name]["live"]
    assert made <= planned
    assert planned < 3 * made


def test_a_kernel_is_compiled_once_and_then_found_on_disk(answers: dict[str, dict]):
    assert answers["compiled"]["counts"] == [[2, 2, 0], [2, 0, 2]]  # collected, compiled, from disk
    assert answers["compiled"]["reports"] == [[1, 2], [2, 2]] * 2


def test_what_is_compiled_late_is_counted_once_and_named(answers: dict[str, dict]):
    assert answers["compiled"]["late"] == 1
    warned = [line for line in answers["stderr"]["text"].splitlines() if "which prepare should have done" in line]
    assert len(warned) == 1
    assert "norm_kernel" in warned[0]
    assert "('constexpr', 256)" in warned[0]


def test_twins_have_sizes_strides_and_alignment_and_no_memory():
    whole = torch.zeros(6, 40, dtype=torch.bfloat16)
    view = {"a": [whole[:, 3:11], whole], "b": RingView(whole[1:, ::2]), "c": 7}
    twin = Twins()(view)
    for old, new in ((view["a"][0], twin["a"][0]), (view["a"][1], twin["a"][1]), (view["b"].data, twin["b"].data)):
        assert new.device.type == "meta"
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.data_ptr() % 16 == old.data_ptr() % 16
    assert twin["c"] == 7


def test_twins_of_one_thing_are_one_thing():
    shared = torch.zeros(3)
    twins = Twins()
    first, second = twins([shared, {"x": shared}])
    assert first is second["x"]
    assert twins(shared) is first
    plain = [1, ("a", 2.0)]
    assert twins(plain) is plain


@pytest.mark.parametrize("most", [1, 16, 100, 8192, 10_000])
def test_counts_go_up_to_the_most(most: int):
    found = counts(most)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, most)
    assert found[: min(most, 72)] == list(range(1, min(most, 72) + 1))
    assert all(n in found for n in (511, 512, 513, 640) if n <= most)
