"""`offroad rm`: remove a pulled model from disk."""

from __future__ import annotations

from offroad.cli.options import Model


def rm(model: Model) -> None:
    """Remove a pulled model from disk."""
    from offroad.weights import store

    store.remove(model)
    print(f"removed {model}")
