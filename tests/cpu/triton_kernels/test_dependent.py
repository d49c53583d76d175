"""Kernels that may start before the one before has ended touch memory, but for weights, only after their turn."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from offroad.triton_kernels import dependent  # noqa: E402

FOLDER = Path(dependent.__file__).parent
KERNELS = {
    function.name: function
    for path in FOLDER.glob("*.py")
    if path.name != "dependent.py"
    for function in ast.parse(path.read_text()).body
    if isinstance(function, ast.FunctionDef) and "PDL" in [argument.arg for argument in function.args.args]
}


WEIGHTS = re.compile(
    r"tl\.load\((weight|post) \+ at, mask=live, other=0\.0\)"
)  # of norms: no kernel of a step writes them


def touches(statement: ast.stmt, name: str) -> bool:
    text = ast.unparse(statement)
    if name.endswith("norm_kernel"):
        text = WEIGHTS.sub("", text)
    return any(f"tl.{call}" in text for call in ("load", "store", "atomic")) or "return" in text


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_the_turn_comes_before_memory_and_before_any_end(name: str):
    """Not within a condition: a program that ends without its turn would let others think that all before is done."""
    body = KERNELS[name].body
    turns = [i for i, statement in enumerate(body) if ast.unparse(statement) in ("take_turn(PDL)", "wait_turn(PDL)")]
    assert len(turns) == 1
    assert not any(touches(statement, name) for statement in body[: turns[0]])


def test_kernels_that_fill_the_gpu_for_long_do_not_let_others_crowd_it():
    for name in ("linear", "dequantise", "paged_decode", "step_kernel"):
        assert "wait_turn(PDL)" in ast.unparse(KERNELS[name])


def test_a_launch_that_may_start_early_says_so_to_kernel_and_driver(monkeypatch):
    monkeypatch.setattr(dependent, "_supported", lambda: True)
    monkeypatch.setattr(dependent, "_most", [dependent.MOST])
    for most in (dependent.MOST, 64, 64):  # more where a kernel allows it, and never less again
        dependent.allow(most)
        assert dependent.most() == most
        assert dependent.launching(most) == {"PDL": True, "launch_pdl": True}
        assert dependent.launching(most + 1) == {"PDL": False}
    dependent.allow(dependent.MOST)
    assert dependent.most() == 64
    monkeypatch.setattr(dependent, "_supported", lambda: False)
    assert dependent.launching(1) == {"PDL": False}
