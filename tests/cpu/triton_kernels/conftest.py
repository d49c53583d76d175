"""Kernels run in Triton's interpreter here: the variable must be set before a module with kernels is imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _run_time_loop_bounds():
    """Triton 3.6 converts a loop's bounds from arrays of one number, which NumPy 2.4 refuses."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = original
