"""Kernels run in Triton's interpreter here: see tests/conftest.py. With a GPU they are tested there, in tests/gpu."""

import os

import numpy as np
import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _interpreter():
    """Three gaps of Triton 3.6's interpreter: run-time loop bounds are arrays of one number, which NumPy 2.4 no longer
    takes for a number; a dot of bf16 multiplies bit patterns; and bf16 is rounded towards zero, where GPUs round to
    the nearest."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert, wide, short = interpreter._convert_float, interpreter.tl.float32, interpreter.tl.bfloat16

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def wide_dot(self, a, b, d, precision, depth):
        a, b = (self.create_fp_ext(x, wide) if x.dtype.scalar == short else x for x in (a, b))
        return dot(self, a, b, d, precision, depth)

    def converted(data, source, target, rounding):
        if (source, target) == (short, wide):
            return data.view(np.uint16).astype(np.uint32) << 16
        if (source, target) == (wide, short):
            bits = np.ascontiguousarray(data).view(np.uint32)
            return np.where(np.isnan(data), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        patch.setattr(interpreter, "_convert_float", converted)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)
        yield


@pytest.fixture
def exact_products(monkeypatch):
    """Products of matrices whose bits do not depend on a row's place, which a CPU's BLAS does not promise."""
    from triton.runtime import interpreter

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = (a.data.T[:, :, None] * b.data[:, None]).sum(0)  # one product after the other
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
