"""`offroad serve`: the server, and the one screen that it shows when it is ready."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from offroad.cli.options import ALL_GROUPS, Model, with_settings

if TYPE_CHECKING:
    from offroad.engine import EngineInfo

log = logging.getLogger("offroad.serve")


@with_settings(*ALL_GROUPS)
def serve(model: Model, *, flags: dict[str, Any], config: str | None) -> None:
    """Serve a model over HTTP.

    The OpenAI and Anthropic APIs are under /v1, a chat page at /; /health, /metrics and /plan tell about the server.
    With API keys everything but /health needs one (the page asks for it as a password, of any user).
    Progress and the start-up screen go to stderr. SIGTERM or Ctrl-C finishes running requests, then ends the server.
    """
    from offroad.cli.progress import LoadProgress
    from offroad.serve.server import serve as run_server
    from offroad.settings import Settings

    settings = Settings.resolve({**flags, "model": model}, config)
    if settings.log_json:
        run_server(settings, on_ready=log_ready, progress=LogProgress())
        return
    with LoadProgress() as progress:

        def ready(url: str, info: EngineInfo) -> None:
            progress.finish()
            print(screen(url, info), file=sys.stderr, flush=True)

        run_server(settings, on_ready=ready, progress=progress)


class LogProgress:
    """The phases of a load as log lines, one when each begins."""

    def __init__(self) -> None:
        self._phase = ""

    def __call__(self, phase: str, fraction: float, note: str = "") -> None:
        if phase != self._phase:
            self._phase = phase
            log.info("phase %s", phase)


def log_ready(url: str, info: EngineInfo) -> None:
    """The start-up screen as one log line."""
    fields = {"model": info.model, "max_model_len": info.max_model_len, "device": info.device}
    fields |= {
        "plan": info.plan_fingerprint,
        "memory": info.memory_summary,
        "load_seconds": round(info.load_seconds, 2),
    }
    log.info("ready at %s", url, extra={"fields": fields})


def screen(url: str, info: EngineInfo) -> str:
    """What is served, where, with what: at most a screen."""
    lines = [
        ("address", f"{url} (chat page), {url}/v1 (OpenAI API)"),
        ("model", f"{info.model} ({info.family})"),
        ("context", f"{info.max_model_len:,} tokens"),
        ("concurrency", f"up to {info.max_num_seqs} sequences"),
        ("device", f"{info.device}, {info.dtype}"),
        ("memory", info.memory_summary),
        ("plan", f"{info.plan_fingerprint} (all of it: {url}/plan)"),
        ("loaded in", f"{info.load_seconds:.1f} s"),
    ]
    lines += [("kernels", info.compiled)] if info.compiled else []
    lines += [("", line) for line in info.plan_summary.splitlines()]
    return "\n".join(["", *(f"{name:<13}{value}" for name, value in lines), ""])
