"""Which devices draw unfiltered tokens by a kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from offroad.device.profile import DeviceProfile
from offroad.sample.choose import Filters
from offroad.triton_kernels.kernel import OLDEST


def fused_draw(device: DeviceProfile) -> Callable[[Tensor, Filters], Tensor] | None:
    """A function that draws the tokens of `choose_dense` without top_k and top_p, for devices with Triton kernels; None
    for others, which draw the same tokens in more launches."""
    if device.kind != "cuda" or (device.compute_capability or (0, 0)) < OLDEST:
        return None
    if device.source == "probe" and device.tool("triton") is None:
        return None
    return import_module("offroad.triton_kernels.sample_jit").draw
