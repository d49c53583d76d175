"""Run as a program: `serve_fake.py FACTORY SETTINGS` (JSON) serves a fake engine from a process of its own."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "execute"), str(HERE.parents[2] / "src")]

from fake_text import FakeText  # noqa: E402

from offroad.errors import OffroadError  # noqa: E402
from offroad.execute.client import EngineClient  # noqa: E402
from offroad.serve.server import serve  # noqa: E402
from offroad.settings import Settings  # noqa: E402

settings = Settings.of(**json.loads(sys.argv[2]))
client = EngineClient(settings, factory=f"fake_engine:{sys.argv[1]}")


def ready(url, info) -> None:
    print("ready", url, client.worker_pid, info.max_model_len, flush=True)


try:
    serve(settings, ready, client=client, make_text=lambda files, settings: FakeText({}))
except OffroadError as error:
    print("error", error, flush=True)
    sys.exit(error.exit_code)
