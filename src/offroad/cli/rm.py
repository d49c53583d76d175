"""`offroad rm`: remove a pulled model from disk."""

from __future__ import annotations

from offroad.cli.options import Model
from offroad.cli.table import size


def rm(model: Model) -> None:
    """Remove a pulled model from disk."""
    from offroad.weights import store

    print(f"removed {model}: {size(store.remove(model))}")
