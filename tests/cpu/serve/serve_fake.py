"""Run as a program: `serve_fake.py MODEL DRAIN_SECONDS [FACTORY]` serves a fake engine from a process of its own."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "execute"), str(HERE.parents[2] / "src")]

from fake_text import FakeText  # noqa: E402

from offroad.errors import OffroadError  # noqa: E402
from offroad.execute.client import EngineClient  # noqa: E402
from offroad.serve.server import serve  # noqa: E402
from offroad.settings import Settings  # noqa: E402

model, drain, factory = sys.argv[1], float(sys.argv[2]), sys.argv[3]
port = int(sys.argv[4])
settings = Settings(model=model, port=port, drain_seconds=drain)
client = EngineClient(settings, factory=f"fake_engine:{factory}")


def ready(url, info) -> None:
    print("ready", url, client.worker_pid, info.max_model_len, flush=True)


try:
    serve(settings, ready, client=client, make_text=lambda files, settings: FakeText({}))
except OffroadError as error:
    print("error", error, flush=True)
    sys.exit(error.exit_code)
