"""Latency and throughput by concurrency, as a record that holds what is needed to check it.

Definitions, of one round of c requests that start together: *ttft* is a request's time to its first token; *itl* are
the times between a request's arrivals after that; *decode* is the tokens after each request's first one, over the time
from the earliest first token to the last of all; *prefill* is prompt tokens over the time to the last first token;
*throughput* is all generated tokens over the whole round. Prompts are random ids, different in each request, so that no
prefix is shared.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offroad import __version__
from offroad.device.probe import package_version
from offroad.errors import OffroadError, SettingsError

if TYPE_CHECKING:
    from offroad.engine import Engine

FORMAT = "offroad-bench-1"
METRICS = {
    "ttft_ms": "lower",
    "itl_ms": "lower",
    "itl_p99_ms": "lower",
    "decode_tok_s": "higher",
    "prefill_tok_s": "higher",
    "throughput_tok_s": "higher",
}


@dataclass(frozen=True)
class Load:
    """What is asked: requests at once, tokens in, tokens out, rounds at each concurrency."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    repeat: int
    seed: int = 0


@dataclass
class Sample:
    """One request: seconds from the round's start at which tokens arrived, and how many came each time."""

    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, when: float, count: int) -> None:
        self.arrivals.append(when)
        self.tokens.append(count)


class Target(Protocol):
    """Something that can run a round of prompts, all started together."""

    def facts(self) -> dict[str, Any]:
        """Model, device, plan fingerprint, as far as they are known."""
        ...

    def vocab(self) -> int: ...

    def round(self, prompts: list[list[int]], output_tokens: int) -> list[Sample]: ...

    def close(self) -> None: ...


class EngineTarget:
    """An engine in this process: no HTTP and no text."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.number = engine, 0

    def facts(self) -> dict[str, Any]:
        info = self.engine.info
        return {
            "kind": "engine",
            "model": info.model,
            "device": info.device,
            "dtype": info.dtype,
            "plan_fingerprint": info.plan_fingerprint,
            "max_num_seqs": info.max_num_seqs,
        }

    def vocab(self) -> int:
        return self.engine.info.vocab

    def round(self, prompts: list[list[int]], output_tokens: int) -> list[Sample]:
        from offroad.sample.params import SamplingParams
        from offroad.schedule.request import Request

        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        samples, order = [Sample() for _ in prompts], {}
        began = time.perf_counter()
        for i, ids in enumerate(prompts):
            self.number += 1
            request = Request(id=f"bench-{self.number}", prompt_ids=ids, params=params, seed=i)
            order[request.id] = i
            self.engine.submit(request)
        while self.engine.has_work():
            events = self.engine.step()
            now = time.perf_counter() - began
            for event in events:
                if event.finish_reason in ("error", "abort"):
                    raise OffroadError(
                        f"request {event.request_id} ended with {event.finish_reason}", found=event.error
                    )
                if event.token_ids:
                    samples[order[event.request_id]].add(now, len(event.token_ids))
        return samples

    def close(self) -> None:
        self.engine.close()


class ServerTarget:
    """A server behind its OpenAI completions route; times include HTTP. An arrival is one event of the stream.

    Servers that can (offroad, vLLM) tell the token ids of each event; with others an event with text counts as a token.
    """

    def __init__(self, url: str) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(timeout=httpx.Timeout(10.0, read=600.0), limits=httpx.Limits(max_connections=None))
        self.model = self._get("/v1/models")["data"][0]["id"]
        self.ids = self.client.get(self.url + "/version").status_code == 200

    def _get(self, path: str) -> Any:
        import httpx

        try:
            response = self.client.get(self.url + path)
            response.raise_for_status()
            return response.json()
        except httpx.HTTPError as error:
            raise OffroadError(
                f"no answer from {self.url}{path}", found=str(error), next="is the server running?"
            ) from error

    def facts(self) -> dict[str, Any]:
        plan = self.client.get(self.url + "/plan")
        known = plan.json() if plan.status_code == 200 else {}
        return {
            "kind": "server",
            "model": self.model,
            "device": known.get("device"),
            "dtype": known.get("dtype"),
            "plan_fingerprint": known.get("fingerprint"),
            "max_num_seqs": known.get("max_num_seqs"),
        }

    def vocab(self) -> int:
        return 8192  # the API does not tell; every model served has as many

    def round(self, prompts: list[list[int]], output_tokens: int) -> list[Sample]:
        samples: list[Sample | Exception] = [Sample() for _ in prompts]
        began = time.perf_counter()

        def one(i: int) -> None:
            try:
                samples[i] = self._request(prompts[i], output_tokens, began)
            except Exception as error:  # handed to the caller's thread, which raises it
                samples[i] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for sample in samples:
            if isinstance(sample, Exception):
                raise sample
        return samples

    def stream(self, ids: list[int], output_tokens: int, **fields: Any) -> Iterator[dict[str, Any]]:
        """Events of one request's stream; `fields` are more of its body. Raises OffroadError."""
        from offroad.cli.backend import error_message, sse_events

        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        with self.client.stream("POST", self.url + "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise OffroadError(f"{self.url} answered {response.status_code}", found=error_message(response.text))
            for event in sse_events(response.iter_lines()):
                if "error" in event:
                    raise OffroadError("the stream ended with an error", found=str(event["error"]))
                yield event

    def _request(self, ids: list[int], output_tokens: int, began: float) -> Sample:
        sample, total = Sample(), 0
        for event in self.stream(ids, output_tokens, **({"return_token_ids": True} if self.ids else {})):
            for choice in event.get("choices", []):
                ids = choice.get("token_ids")
                if ids or (ids is None and choice.get("text")):
                    sample.add(time.perf_counter() - began, len(ids) if ids else 1)
            total = (event.get("usage") or {}).get("completion_tokens", total)
        if not sample.arrivals or not total:
            raise OffroadError(
                "a stream of the server",
                found=f"{len(sample.arrivals)} pieces, {total} tokens in usage",
                accepted="tokens or text, and a usage event",
            )
        # Text may be held back (UTF-8, stop strings), so pieces are fewer than tokens: the last one carries the rest.
        sample.tokens[-1] += total - sum(sample.tokens)
        return sample

    def close(self) -> None:
        self.client.close()


def prompts_for(load: Load, vocab: int, concurrency: int, number: int) -> list[list[int]]:
    """Random prompts of a round, the same for the same load; ids below 32 are often special tokens and are left out."""
    source = random.Random(f"{load.seed} {concurrency} {number}")
    return [[source.randrange(32, vocab) for _ in range(load.prompt_tokens)] for _ in range(concurrency)]


def sweep(target: Target, load: Load, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """One point for each concurrency, after a round that is not counted."""
    target.round(prompts_for(load, target.vocab(), 1, -1), min(4, load.output_tokens))
    points = []
    for concurrency in load.concurrency:
        rounds = []
        for number in range(load.repeat):
            report(f"concurrency {concurrency}, round {number + 1} of {load.repeat}")
            rounds.append(target.round(prompts_for(load, target.vocab(), concurrency, number), load.output_tokens))
        points.append(
            {
                "concurrency": concurrency,
                "summary": summarise(rounds, load),
                "rounds": [[asdict(sample) for sample in samples] for samples in rounds],
            }
        )
    return points


def summarise(rounds: list[list[Sample]], load: Load) -> dict[str, float]:
    """Medians over requests (ttft, itl) and over rounds (speeds), by the definitions above."""
    ttft = [sample.arrivals[0] for samples in rounds for sample in samples]
    gaps = [b - a for samples in rounds for s in samples for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    decode, prefill, throughput = [], [], []
    for samples in rounds:
        first = [sample.arrivals[0] for sample in samples]
        end = max(sample.arrivals[-1] for sample in samples)
        later = sum(sum(sample.tokens[1:]) for sample in samples)
        if end > min(first):
            decode.append(later / (end - min(first)))
        prefill.append(load.prompt_tokens * len(samples) / max(first))
        throughput.append(sum(sum(sample.tokens) for sample in samples) / end)
    return {
        "ttft_ms": 1e3 * statistics.median(ttft),
        "ttft_max_ms": 1e3 * max(ttft),
        "itl_ms": 1e3 * statistics.median(gaps) if gaps else 0.0,
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99) if gaps else 0.0,
        "decode_tok_s": statistics.median(decode) if decode else 0.0,
        "prefill_tok_s": statistics.median(prefill),
        "throughput_tok_s": statistics.median(throughput),
    }


def percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(fraction * 1000) * len(ordered) // 1000) - 1)]


def record(target: Target, load: Any, points: list[dict[str, Any]], command: list[str]) -> dict[str, Any]:
    """The evidence: what was run, of which commit, where, with what, and every sample."""
    versions = {name: package_version(name) for name in ("torch", "triton", "numpy")}
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "versions": {"offroad": __version__, "python": platform.python_version(), **versions},
        "system": platform.platform(),
        "target": target.facts(),
        "load": asdict(load),
        "points": points,
    }


def commit() -> str | None:
    """The commit of this checkout, `+changes` if files differ from it; None when installed without git."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside somebody else's repository: only a tracked file speaks for the commit.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changes else head


def read_record(path: Path) -> dict[str, Any]:
    """A record written by `--output`. Raises SettingsError if it is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(
            f"--baseline {path}", found=str(error), accepted="a record made by `offroad bench --output`"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise SettingsError(f"--baseline {path}", found="another kind of file", accepted=f"a record of format {FORMAT}")
    return data


def ratios(new: dict[str, Any], old: dict[str, Any]) -> list[dict[str, Any]]:
    """Each metric over the baseline's, by concurrency that both have. Raises SettingsError if they share none."""
    before = {point["concurrency"]: point["summary"] for point in old["points"]}
    found = []
    for point in new["points"]:
        if point["concurrency"] in before:
            reference = before[point["concurrency"]]
            values = {name: point["summary"][name] / reference[name] if reference[name] else None for name in METRICS}
            found.append({"concurrency": point["concurrency"], "ratios": values})
    if not found:
        raise SettingsError(
            "--baseline", found=f"concurrency {sorted(before)}", accepted="one that was measured now as well"
        )
    return found


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """What makes two records hard to compare: another load, target, plan, or system."""
    pairs = [
        (f"load.{name}", new["load"][name], old["load"][name]) for name in ("prompt_tokens", "output_tokens", "repeat")
    ]
    pairs += [
        (f"target.{name}", new["target"].get(name), old["target"].get(name))
        for name in ("kind", "model", "device", "plan_fingerprint")
    ]
    pairs.append(("system", new["system"], old["system"]))
    return [f"{name}: {after} now, {before} in the baseline" for name, after, before in pairs if after != before]


def render(data: dict[str, Any]) -> str:
    """The record as a table with a line on what was measured."""
    from offroad.cli.table import table

    target, load = data["target"], data["load"]
    head = (
        f"{target['model']} on {target['device'] or 'an unknown device'}, "
        f"{load['prompt_tokens']} tokens in, {load['output_tokens']} out, median of {load['repeat']} rounds, "
        f"plan {target['plan_fingerprint'] or 'unknown'}"
    )
    rows = [(p["concurrency"], *(round(p["summary"][name], 1) for name in METRICS)) for p in data["points"]]
    return (
        head
        + "\n"
        + table(("AT ONCE", "TTFT ms", "ITL ms", "ITL p99 ms", "DECODE tok/s", "PREFILL tok/s", "OUTPUT tok/s"), rows)
    )


def render_ratios(new: dict[str, Any], old: dict[str, Any]) -> str:
    """New over old by metric, after the differences that make the comparison doubtful."""
    from offroad.cli.table import table

    rows = []
    for entry in ratios(new, old):
        rows += [
            (entry["concurrency"], name, "-" if value is None else f"{value:.3f}", f"{METRICS[name]} is better")
            for name, value in entry["ratios"].items()
        ]
    notes = [f"differs: {line}" for line in differences(new, old)]
    return "\n".join(
        [*notes, f"ratio to {old['date']} ({old['commit']})", table(("AT ONCE", "METRIC", "RATIO", ""), rows)]
    )
