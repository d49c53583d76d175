"""What Hopper's kernels have in common: their target and its shared memory; of linears, the numbers of what they are
specialised by."""

from __future__ import annotations

import torch

TARGET = "sm_90a"
SHARED = 232_448  # bytes of a block, at most
BITS = {"int4": 4, "e4m3": 8}  # of a code
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}
