"""Copies between the host and a CUDA device: pinned, packed into one, and without waiting where nothing is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

_PLACES = 16  # uploads that may be under way before one waits for the first


class Pinned:
    """A pinned buffer whose last copy may be under way; `reserve` waits for it."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()

    def reserve(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] to write to."""
        self.copied.synchronize()
        if len(self.data) < nbytes:
            self.data = torch.empty(max(nbytes, 2 * len(self.data), 4096), dtype=torch.uint8, pin_memory=True)
        return self.data[:nbytes]


class Upload:
    """Arrays to a device, several by one copy."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.next = device, 0
        self.places = [Pinned() for _ in range(_PLACES)] if device.type == "cuda" else []

    def __call__(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays on the device, in their own dtypes and shapes."""
        starts, end = packed_offsets(arrays)
        if self.places:
            place = self.places[self.next]
            self.next = (self.next + 1) % len(self.places)
            host = place.reserve(end)
            write(host.numpy(), arrays, starts)
            whole = host.to(self.device, non_blocking=True)
            place.copied.record()
        else:
            whole = torch.empty(end, dtype=torch.uint8)
            write(whole.numpy(), arrays, starts)
        return [view(whole, array, start) for array, start in zip(arrays, starts, strict=True)]


class Download:
    """int64 numbers from a device, a copy for each tensor; `ahead` of them may be under way."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self.places = deque(Pinned() for _ in range(ahead)) if device.type == "cuda" else None

    def __call__(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        """Begins to copy an int64 tensor. What is returned waits for its values, which are valid until `ahead` more
        copies have begun."""
        if self.places is None:
            return tensor.clone().numpy
        place = self.places[0]
        self.places.rotate(-1)
        host = place.reserve(8 * tensor.numel()).view(torch.int64).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        place.copied.record()

        def values() -> np.ndarray:
            place.copied.synchronize()
            return host.numpy()

        return values


class Mirror:
    """Bytes on the host, and as many at one place on the device, where what is captured finds them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.zeros(nbytes, dtype=torch.uint8)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.device = torch.zeros(self.host.shape, dtype=torch.uint8, device=device)
        self.copied = torch.cuda.Event() if device.type == "cuda" else None

    def views(self, arrays: tuple[np.ndarray, ...]) -> tuple[list[np.ndarray], list[torch.Tensor], int]:
        """The first bytes as arrays of these shapes and dtypes: on the host, on the device, and how many bytes."""
        starts, nbytes = packed_offsets(arrays)
        pairs = list(zip(arrays, starts, strict=True))
        host = [view(self.host, array, start).numpy() for array, start in pairs]
        return host, [view(self.device, array, start) for array, start in pairs], nbytes

    def reserve(self) -> None:
        """Waits until the host's bytes may be overwritten."""
        if self.copied is not None:
            self.copied.synchronize()

    def upload(self, nbytes: int) -> None:
        """Copies the first bytes to the device."""
        self.device[:nbytes].copy_(self.host[:nbytes], non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def packed_offsets(arrays: tuple[np.ndarray, ...]) -> tuple[list[int], int]:
    """Where each array begins in a buffer of bytes, at multiples of 16, and the end."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // 16) * 16
    return starts, end


def write(buffer: np.ndarray, arrays: tuple[np.ndarray, ...], starts: list[int]) -> None:
    """Puts the arrays' bytes where they belong in uint8 `buffer`."""
    for array, start in zip(arrays, starts, strict=True):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def view(buffer: torch.Tensor, array: np.ndarray, start: int) -> torch.Tensor:
    """The part of a buffer of bytes that holds `array`, in its dtype and shape."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
