"""Speed of the engine alone, in the cases that engines are compared by, with the share of the device's roofline.

*decode* is measured by difference: rounds of c prompts with 129 tokens of answer each, and with 1; c * 128 tokens over
the difference of the best times. Its rounds begin with steps in which some sequences decode while prompts of others are
read, so it holds what they cost each other. *decode_steady* leaves those out: of the steps in which every sequence got
a token, the middle half, its tokens over its time; the best round. A round in which the sequences never decode all
together, or in fewer than 8 steps, has none. *prefill* is the tokens of one prompt over the time to its first token.
With `--speculative-config` a step gives several tokens: those that came are what is counted, and beside a decode figure
the record has how many a step gave each sequence, which for dummy drafts (`speculate/dummy.py`) is about what their
acceptance makes expected. *ready* is the construction of the engine. Prompts are random ids, all different, and the
prefix cache is off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offroad.engine import Engine
from offroad.errors import SettingsError
from offroad.evidence.perf import EngineTarget, Sample, commit
from offroad.models.registry import resolve_source
from offroad.ops.budget import Dtypes, packed_bytes
from offroad.ops.roofline import Costs, costs
from offroad.settings import Settings
from offroad.speculate.config import Speculation, speculation
from offroad.speculate.dummy import expected_tokens
from offroad.weights.source import Source

FORMAT = "offroad-bench-engine-1"
ANSWER = 128  # tokens after the first
STEADY = "decode_steady"
_FEWEST = 8  # steps that a steady speed is taken from; over fewer, one that stumbles is most of it
Save = Callable[[dict[str, float], dict[str, list[float]], dict[str, float]], None]


class BenchSettings(Settings):
    """Settings of an engine that is only timed: dummy drafts are taken here, and nowhere else."""

    def drafter(self) -> Speculation | None:
        return speculation(self.speculative_config)


@dataclass(frozen=True)
class Case:
    """Prompts at once, and the tokens of each; a decode case is timed with an answer too."""

    rows: int
    prompt: int
    decode: bool


CASES: dict[str, Case] = {
    **{f"decode_c{rows}": Case(rows, 1024, True) for rows in (1, 8, 32, 64)},
    "decode_c1_ctx16k": Case(1, 16384, True),
    "prefill_8k": Case(1, 8192, False),
    "prefill_16k": Case(1, 16384, False),
}


def chosen(names: list[str]) -> dict[str, Case]:
    """The cases of these names, or all. Raises SettingsError for an unknown one."""
    if wrong := [name for name in names if name not in CASES]:
        raise SettingsError("--cases", found=", ".join(wrong), accepted=", ".join(CASES))
    return {name: CASES[name] for name in names or CASES}


def settings_for(cases: dict[str, Case]) -> dict[str, Any]:
    """Engine settings that the cases need; a user's flags go over them."""
    return {
        "max_num_seqs": max(case.rows for case in cases.values()),
        "max_num_batched_tokens": 8192,
        "max_model_len": max(case.prompt for case in cases.values()) + ANSWER + 1,
        "enable_prefix_caching": False,
        "memory_utilization": 0.95,
    }


@dataclass
class Rounds:
    """Times rounds on an engine, each as often as asked and not twice."""

    target: EngineTarget
    repeat: int
    report: Callable[[str], None]
    done: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    steady: dict[tuple[int, int, int], float] = field(default_factory=dict)
    per_step: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def seconds(self, rows: int, prompt: int, answer: int) -> float:
        """The best time of rounds of `rows` prompts of `prompt` tokens and answers of `answer`."""
        key = (rows, prompt, answer)
        if key not in self.done:
            self.report(f"{rows} x {prompt} tokens, {answer} of answer")
            self.done[key] = [self._once(key, number) for number in range(self.repeat)]
        return min(self.done[key])

    def _once(self, key: tuple[int, int, int], number: int) -> float:
        rows, prompt, answer = key
        samples = self.target.round(prompts(rows, prompt, self.target.vocab(), f"{key} {number}"), answer)
        assert all(sum(sample.tokens) == answer for sample in samples), "an answer has the tokens that were asked for"
        if answer > 1:
            came = [count for sample in samples for count in sample.tokens[1:]]
            self.per_step[key] = sum(came) / len(came)
        if (speed := steady(samples)) is not None:
            self.steady[key] = max(speed, self.steady.get(key, 0.0))
        return max(sample.arrivals[-1] for sample in samples)

    def warm(self, rows: int, prompt: int) -> None:
        """A round that is not counted: libraries choose their algorithms in it."""
        self.target.round(prompts(rows, prompt, self.target.vocab(), f"warm {rows} {prompt}"), 4)


def prompts(rows: int, tokens: int, vocab: int, seed: str) -> list[list[int]]:
    """Random ids; those below 32 are often special tokens and are left out."""
    source = random.Random(seed)
    return [[source.randrange(32, vocab) for _ in range(tokens)] for _ in range(rows)]


def steady(samples: list[Sample]) -> float | None:
    """Tokens a second over the middle half of the steps in which every sequence got a token after its first; None
    where there are too few such steps. Arrivals of one step have the same time."""
    times = sorted(set.intersection(*(set(sample.arrivals[1:]) for sample in samples)))
    if len(times) < _FEWEST:
        return None
    begin, end = times[len(times) // 4], times[len(times) - 1 - len(times) // 4]
    came = sum(
        count
        for sample in samples
        for when, count in zip(sample.arrivals, sample.tokens, strict=True)
        if begin < when <= end
    )
    return came / (end - begin)


def measure(
    engine: Engine, cases: dict[str, Case], repeat: int, report: Callable[[str], None], save: Save
) -> dict[str, float]:
    """Tokens a second by case. After each case they are reported, and given to `save` with the seconds of every round
    by "rows x prompt + answer", and the tokens that a step gave a sequence by decode case: a run that is ended later
    has them."""
    rounds = Rounds(EngineTarget(engine), repeat, report)
    speeds: dict[str, float] = {}
    per_step: dict[str, float] = {}
    for name, case in cases.items():
        found = _speeds(rounds, name, case)
        speeds |= found
        if case.decode:
            per_step[name] = rounds.per_step[case.rows, case.prompt, ANSWER + 1]
        report(", ".join(f"{name} {speed:,.1f} tok/s" for name, speed in found.items()))
        save(
            dict(speeds),
            {f"{rows} x {prompt} + {answer}": times for (rows, prompt, answer), times in rounds.done.items()},
            dict(per_step),
        )
    return speeds


def _speeds(rounds: Rounds, name: str, case: Case) -> dict[str, float]:
    """The case's figure, and beside one of decode that of its steady steps."""
    rounds.warm(case.rows, min(case.prompt, 1024) if case.decode else case.prompt)
    first = rounds.seconds(case.rows, case.prompt, 1)
    if not case.decode:
        return {name: case.rows * case.prompt / first}
    whole = rounds.seconds(case.rows, case.prompt, ANSWER + 1)
    speeds = {name: case.rows * ANSWER / max(whole - first, 1e-9)}
    if (speed := rounds.steady.get((case.rows, case.prompt, ANSWER + 1))) is not None:
        speeds[steady_name(name)] = speed
    return speeds


def steady_name(name: str) -> str:
    """The key of a decode case's steady speed: decode_steady_c8 of decode_c8."""
    return name.replace("decode", STEADY, 1)


def figures() -> dict[str, Case]:
    """Every key that a speed may have, with its case, in the order of cases."""
    found = {}
    for name, case in CASES.items():
        found[name] = case
        if case.decode:
            found[steady_name(name)] = case
    return found


def costs_of(engine: Engine, source: Source) -> Costs | None:
    """Bytes and operations of the engine's model, from its plan."""
    resolved, source = resolve_source(source)
    plan = engine.plan
    packed = packed_bytes(resolved.spec, source.headers, plan.cells, plan.dtype)
    return costs(resolved.spec, packed, plan.device, Dtypes(plan.dtype, plan.kv_dtype))


def shares(speeds: dict[str, float], found: Costs | None) -> dict[str, float]:
    """Each speed over the roofline's; nothing where the device's rates are unknown. With drafts steps have several rows
    a sequence, of which the roofline knows nothing: the caller leaves those out."""
    if found is None:
        return {}
    result, cases = {}, figures()
    for name, speed in speeds.items():
        case = cases[name]
        if case.decode:
            bound = case.rows / found.decode(case.rows, case.prompt + ANSWER // 2)
        else:
            bound = case.rows * case.prompt / (case.rows * found.prefill(case.prompt))
        result[name] = speed / bound
    return result


def record(
    engine: Engine,
    found: Costs | None,
    ready: float,
    cases: dict[str, Case],
    speeds: dict[str, float],
    rounds: dict[str, list[float]],
    per_step: dict[str, float],
) -> dict[str, Any]:
    """The evidence: figures, their share of the roofline by `found`, what ran, and every time. `missing`: cases that
    were asked for and are not measured yet."""
    info, plan = engine.info, engine.plan
    bounded = {name: speed for name, speed in speeds.items() if not (plan.k and figures()[name].decode)}
    rates = None if found is None else {"bytes_s": found.bandwidth, "operations_s": found.rate}
    return {
        "format": FORMAT,
        "model": info.model,
        "device": info.device,
        "commit": commit(),
        "plan_fingerprint": info.plan_fingerprint,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "kernels": plan.kernels(),
        "graphs": list(plan.graphs.rows) or plan.graphs.reason,
        "memory": info.memory_summary,
        "compiled": info.compiled,
        **speeds,
        "ready_s": ready,
        "missing": [name for name in cases if name not in speeds],
        "roofline_share": shares(bounded, found),
        "rates": rates,
        "rounds": rounds,
        "speculation": None if plan.drafter is None else drafts(engine, plan.drafter, per_step),
    }


def drafts(engine: Engine, drafter: Speculation, per_step: dict[str, float]) -> dict[str, Any]:
    """What was set and what was seen. `tokens_per_step`: by decode case, of a sequence, its last step cut off at the
    answer's end; `acceptance_by_place`: over all rounds, of drafts behind accepted ones; None: there were none."""
    stats, rate = engine.stats(), drafter.acceptance
    accepted = stats.accepted_by_place
    reached = [stats.drafted_by_place[0], *accepted[:-1]]
    return {
        "method": drafter.method,
        "num_speculative_tokens": drafter.tokens,
        "acceptance": rate,
        "tokens_per_step_expected": None if rate is None else expected_tokens(drafter.tokens, rate),
        "tokens_per_step": per_step,
        "draft_rows": stats.draft_rows,
        "acceptance_by_place": [
            right / tried if tried else None for right, tried in zip(accepted, reached, strict=True)
        ],
    }


def render(data: dict[str, Any]) -> str:
    """The record as a table."""
    from offroad.cli.table import table

    head = f"{data['model']} on {data['device']}, plan {data['plan_fingerprint']}, ready in {data['ready_s']:.1f} s"
    if (drafter := data["speculation"]) is not None:
        head += f"\n{render_drafts(drafter)}"
    share, seen = data["roofline_share"], (drafter or {}).get("tokens_per_step", {})
    titles = ("CASE", "tok/s", "OF THE ROOFLINE", *(["TOKENS A STEP"] if drafter else []))
    rows = []
    for name in (name for name in figures() if name in data):
        steps = [f"{seen[name]:.2f}" if name in seen else "-"] if drafter else []
        rows.append((name, round(data[name], 1), f"{100 * share[name]:.0f} %" if name in share else "-", *steps))
    return head + "\n" + table(titles, rows)


def render_drafts(drafter: dict[str, Any]) -> str:
    """A line on the drafts that were checked."""
    by_place = ", ".join("-" if rate is None else f"{rate:.2f}" for rate in drafter["acceptance_by_place"])
    line = (
        f"drafts: {drafter['method']}, up to {drafter['num_speculative_tokens']} a step, accepted by place {by_place}"
    )
    if drafter["acceptance"] is None:
        return line
    expected = drafter["tokens_per_step_expected"]
    return f"{line}; set {drafter['acceptance']:.2f}, with which {expected:.2f} tokens a step are expected"
