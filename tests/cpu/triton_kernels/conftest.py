"""Kernels run in Triton's interpreter here: the variable must be set before a module with kernels is imported."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _interpreter():
    """Two gaps of Triton 3.6's interpreter: run-time loop bounds are arrays of one number, which NumPy 2.4 no longer
    takes for a number, and a dot of bf16 multiplies bit patterns."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide_dot(self, a, b, d, precision, depth):
        wide = interpreter.tl.float32
        a, b = (x if x.dtype.scalar != interpreter.tl.bfloat16 else self.create_fp_ext(x, wide) for x in (a, b))
        return dot(self, a, b, d, precision, depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)
        yield
