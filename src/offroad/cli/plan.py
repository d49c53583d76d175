"""`offroad plan`: what would run where and why, without reading a weight."""

from __future__ import annotations

import json
import sys
from typing import Any

from offroad.cli.options import ALL_GROUPS, Json, Model, with_settings


@with_settings(*ALL_GROUPS)
def plan(model: Model, json_output: Json = False, *, flags: dict[str, Any], config: str | None) -> None:
    """Show what would run where, and why.

    MODEL may be a config.json alone. Prints the kernel of every layer and how memory would be divided. Needs no GPU:
    --device names a profile (see `offroad doctor`). Exit code 3: some cell has no kernel, or the model does not fit.
    """
    from offroad.settings import Settings

    settings = Settings.resolve({**flags, "model": model}, config)  # before the imports: wrong flags are told at once
    from offroad.cli.progress import LoadProgress
    from offroad.engine import make_plan
    from offroad.weights.locate import open_source

    with LoadProgress(("pull",)) as progress:
        source = open_source(settings, lambda fraction, note: progress("pull", fraction, note))
    made = make_plan(settings, source)
    if json_output:
        json.dump(made.to_json(), sys.stdout, indent=2)
        print()
    else:
        print(made.explain())
