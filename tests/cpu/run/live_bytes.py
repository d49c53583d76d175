"""Bytes of tensors that live at once, for forward passes on tensors without memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operations in its block make, until nobody holds it: `most` is the most that there was at once. Views
    count with what they look into; what was there before counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._holders: dict[int, int] = {}  # tensors of each storage
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if not isinstance(tensor, torch.Tensor):
                continue
            key = _storage(tensor)
            if key not in self._holders:
                if key in given:
                    continue
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self.now += self._sizes[key]
                self.most = max(self.most, self.now)
            self._holders[key] = self._holders.get(key, 0) + 1
            weakref.finalize(tensor, self._left, key)
        return found

    def _left(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= self._sizes.pop(key)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
