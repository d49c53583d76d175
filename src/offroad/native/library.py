"""The compiled kernels as Python callables over addresses."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache

from offroad.native.compile import build

_SIGNATURES = {
    "offroad_norm": ([c_char_p], None),
    "offroad_gated": ([c_char_p], None),
    "offroad_qkv_rope": ([c_char_p], None),
    "offroad_linear": ([c_char_p], c_int),
    "offroad_embed": ([c_void_p, c_void_p, c_void_p, c_int64, c_float], None),
    "offroad_attention": ([c_char_p], c_int),
    "offroad_attention_block": ([c_char_p], c_int),
    "offroad_mlp_block": ([c_char_p], c_int),
    "offroad_set_threads": ([c_int], c_int),
}


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if need be and loaded once. Calls release the GIL. Raises CompileError."""
    loaded = ctypes.CDLL(str(build()))
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def set_threads(threads: int) -> int:
    """Makes the kernels run on `threads` threads (the caller's included); gives the number that runs.

    The threads sleep between steps. torch's own (OpenMP) threads do not sleep at once and would take the same cores:
    a process that runs these kernels should call `torch.set_num_threads(1)`.
    """
    return library().offroad_set_threads(threads)
