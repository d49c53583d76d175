"""GPU tests as another GPU would run them:

    python -m pytest tests/gpu/test_attention_on_cuda.py --as 12.0

Triton lowers kernels for that compute capability, with its layouts and its matrix instructions, and writes the result
as PTX for the GPU that is here; offroad sees a device of that capability and its shared memory, so that kernels and
tiles are chosen as there. What is left out is what the other GPU's assembler makes of it, and its speed. For 8.0, 8.6,
8.9, 12.0 and 12.1 on a GPU of 9.0: what code for 10.0 asks of the matrix units has no counterpart.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("as_capability", None)
    if wanted is None:
        return
    if wanted not in CAPABILITIES:
        raise pytest.UsageError(f"--as {wanted}: accepted are {', '.join(CAPABILITIES)}")
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise pytest.UsageError(f"--as {wanted}: needs a CUDA device of compute capability 9.0")
    stand_in(*(int(part) for part in wanted.split(".")))


def stand_in(major: int, minor: int) -> None:
    """From now on torch says that the device has this compute capability, and Triton lowers for it, but assembles for
    the device itself."""
    import torch
    import triton
    from triton.runtime import driver

    from offroad.triton_kernels.compile import SHARED

    there, properties = torch.cuda.get_device_capability(), torch.cuda.get_device_properties

    def pretended(device: object = None) -> SimpleNamespace:
        found = properties(device)
        own = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
        shared = {"shared_memory_per_block_optin": SHARED[10 * major + minor]}
        return SimpleNamespace(**own | {"major": major, "minor": minor, "name": f"as {major}.{minor}"} | shared)

    triton.knobs.runtime.override_arch = f"sm{major}{minor}"
    # What Triton has kept asks torch for the properties each time.
    driver.active.get_device_capability = lambda device=None: there
    torch.cuda.get_device_properties = pretended
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    assert driver.active.get_current_target().arch == 10 * there[0] + there[1]
