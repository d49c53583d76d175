"""Kernels run in Triton's interpreter here: the variable must be set before a module with kernels is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
