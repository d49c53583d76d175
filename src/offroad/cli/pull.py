"""`offroad pull`: fetch a model, with progress, so that it can be used offline."""

from __future__ import annotations

from offroad.cli.options import Model


def pull(model: Model) -> None:
    """Fetch a model and check it.

    What is on disk already is not fetched again.
    """
    from offroad.cli.progress import LoadProgress
    from offroad.weights import store

    with LoadProgress(("pull",)) as progress:
        path = store.pull(model, lambda fraction, note: progress("pull", fraction, note))
    print(path)
