"""`offroad replay`: the requests of a record again."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from offroad.cli.options import Json
from offroad.errors import SettingsError

File = Annotated[str, typer.Argument(metavar="FILE", help="What `offroad serve --record-requests FILE` has written.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the server.")]
Speed = Annotated[
    float, typer.Option("--speed", metavar="FACTOR", help="2: twice as fast as it was.", min=0.001, show_default=False)
]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Key of the server.", show_default=False)]


def replay(
    file: File,
    url: Url = "http://127.0.0.1:8000",
    speed: Speed = 1.0,
    api_key: Key = None,
    json_output: Json = False,
) -> None:
    """Send the requests of a record to a server again.

    They go out at the times at which they came, as they were if the record has their texts; else as completions with
    as many tokens, in and out. Prints how they were answered.
    """
    from offroad.evidence.replay import replay as send
    from offroad.evidence.replay import summary
    from offroad.serve.record import read_record

    entries = read_record(file)
    if not entries:
        raise SettingsError(f"record {file}", found="no requests", accepted="one or more")
    told = summary(*asyncio.run(send(entries, url, speed, api_key)))
    if json_output:
        print(json.dumps(told))
        return
    statuses = ", ".join(f"{count} x {status}" for status, count in told["statuses"].items()) or "none"
    print(f"sent        {told['sent']} ({told['left_out']} left out: nothing is known to send)")
    print(f"answers     {statuses}")
    for name in ("first_byte_seconds", "seconds"):
        if (times := told[name]) is not None:
            label = name.removesuffix("_seconds").replace("_", " ")
            print(f"{label:<12}" + ", ".join(f"{cut} {value:g} s" for cut, value in times.items()))
