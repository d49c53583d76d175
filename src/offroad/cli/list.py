"""`offroad list`: models on disk, and those that can be pulled by a short name."""

from __future__ import annotations

import json
import sys

from offroad.cli.options import Json
from offroad.cli.table import size, table


def list_models(json_output: Json = False) -> None:
    """List models on disk.

    Demo models that can be pulled by a short name are listed too.
    """
    from offroad.weights import store

    entries = store.list_models()
    if json_output:
        json.dump([entry.to_json() for entry in entries], sys.stdout, indent=2)
        print()
        return
    print(table(("NAME", "FORMAT", "SIZE", "PATH"), [(e.name, e.format, size(e.nbytes), e.path) for e in entries]))
