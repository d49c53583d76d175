"""`offroad list`: models on disk, and those that can be pulled by a short name."""

from __future__ import annotations

import json
import sys

from offroad.cli.options import Json
from offroad.cli.table import size, table


def list_models(json_output: Json = False) -> None:
    """List models on disk.

    Demo models that can be pulled by a short name are listed too; --json has only what is on disk.
    """
    from offroad.weights import store

    entries = store.list_models()
    if json_output:
        json.dump([entry.to_json() for entry in entries], sys.stdout, indent=2)
        print()
        return
    rows = [(e.name, e.format, size(e.nbytes), "ready" if e.complete else "incomplete", e.path) for e in entries]
    present = {entry.name for entry in entries}
    rows += [
        (name, "gguf", size(model.nbytes), "not pulled", "-")
        for name, model in store.DEMO_MODELS.items()
        if name not in present
    ]
    print(table(("NAME", "FORMAT", "SIZE", "STATE", "PATH"), rows))
