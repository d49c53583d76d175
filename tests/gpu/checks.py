"""Checks of the GPU that is here, several at a time, a line for each as it ends:

    PYTHONPATH=src python tests/gpu/checks.py --logs /tmp/checks
    PYTHONPATH=src python tests/gpu/checks.py --logs /tmp/checks --lanes 6 --limit 300 --only attention race
    PYTHONPATH=src python tests/gpu/checks.py --logs /tmp/checks --as 12.0

Each file of tests (a long one in two halves), the scripts of launches under compute-sanitizer's memcheck and racecheck,
and `offroad doctor --kernels`. `--as` runs tests as another GPU would (see conftest.py), and nothing else. `--only`
names checks, or parts of their names. A check that is not over after `--limit` seconds is ended, with all that it has
started, and counts as failed. What each printed is in a file of its own in `--logs`. The exit code is 1 if any failed.
V100's kernels are among them: where NVRTC is of CUDA 13 they need build/nvrtc beside (docs/perf/volta.md). Besides
these there are real weights (real_weights.py) and mixed load (benchmarks/soak.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
TESTS = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
LONG = {"gated_delta_on_cuda": "cuts"}  # file of tests, and what names about a half of them
ALONE = {"chunk_graphs_on_cuda"}  # looks at the device's free memory, of which others would take
NOTHING = 5  # pytest's exit code: all of a file is for other GPUs
# Scripts of launches, and flags of the sanitizer: Hopper's kernels ask the driver what it may refuse.
RACES = {"triton_race": (), "hopper_race": ("--report-api-errors", "no"), "sm70_race": ()}
SANITIZER = "compute-sanitizer"
THREADS = "4"  # of a check: references on the CPU would take all cores each


@dataclass(frozen=True)
class Check:
    """Commands, of which each needs the one before to have passed."""

    name: str
    commands: tuple[Sequence[str], ...]
    may_be_empty: bool = False  # tests may all be for other GPUs


@dataclass(frozen=True)
class Outcome:
    name: str
    code: int | None  # None: ended at the limit
    seconds: float
    last: str  # line that it printed

    def __str__(self) -> str:
        said = {0: "passed", None: "NOT OVER"}.get(self.code, f"FAILED ({self.code})")
        return f"{said:<12} {self.name:<32} {self.seconds:5.0f} s  {self.last}"


def tests(wanted: str | None) -> Iterator[Check]:
    pretended = ("--as", wanted) if wanted else ()
    for file in sorted(HERE.glob("test_*.py")):
        name = file.stem.removeprefix("test_")
        command = [*TESTS, str(file), *pretended]
        if half := LONG.get(name):
            yield Check(f"{name} {half}", ([*command, "-k", half],))
            yield Check(f"{name} but {half}", ([*command, "-k", f"not {half}"],))
        else:
            yield Check(name, (command,), may_be_empty=True)


def sanitized(hopper: bool) -> Iterator[Check]:
    """Once without the tool first, so that kernels are compiled before. `hopper`: its own kernels run here."""
    for script, flags in RACES.items():
        if script == "hopper_race" and not hopper:
            continue
        plain = [sys.executable, str(HERE / f"{script}.py")]
        tools = [
            [SANITIZER, "--tool", tool, "--error-exitcode", "9", *flags, *plain] for tool in ("memcheck", "racecheck")
        ]
        yield Check(script, (plain, *tools))


def all_checks(wanted: str | None) -> list[Check]:
    if wanted:
        return list(tests(wanted))
    doctor = Check("doctor", ([sys.executable, "-m", "offroad.cli.main", "doctor", "--kernels"],))
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return [*tests(None), *(sanitized(hopper) if shutil.which(SANITIZER) else ()), doctor]


def code_of(command: Sequence[str], out: object, seconds: float) -> int | None:
    """Exit code of a command; None: it was not over, and has been ended with all that it had started."""
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(check: Check, folder: Path, limit: float) -> Outcome:
    began, log = time.monotonic(), folder / f"{check.name.replace(' ', '_')}.txt"
    code: int | None = 0
    with log.open("w") as out:
        for command in check.commands:
            code = code_of(command, out, limit - (time.monotonic() - began))
            code = 0 if code == NOTHING and check.may_be_empty else code
            if code != 0:
                break
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(check.name, code, time.monotonic() - began, lines[-1].strip()[:160] if lines else "")


def run_all(
    checks: list[Check], folder: Path, lanes: int, limit: float, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """So many at once, in their order, but those that must be alone before the others; `report` has each as it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for alone, at_once in ((True, 1), (False, lanes)):
        with ThreadPoolExecutor(at_once) as pool:
            some = [pool.submit(run, check, folder, limit) for check in checks if (check.name in ALONE) is alone]
            for future in as_completed(some):
                found.append(future.result())
                report(found[-1])
    return found


def chosen(checks: list[Check], only: Sequence[str]) -> list[Check]:
    """Those that have a part of `only` in their names. Raises SystemExit for a part that none has."""
    for part in only:
        if not any(part in check.name for check in checks):
            names = ", ".join(check.name for check in checks)
            raise SystemExit(f"--only {part}: is in the name of no check; names: {names}")
    return [check for check in checks if not only or any(part in check.name for part in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, required=True, help="folder for what each check prints")
    parser.add_argument("--lanes", type=int, default=4, help="checks at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a check")
    parser.add_argument("--only", nargs="+", default=(), help="parts of the names of checks")
    parser.add_argument("--as", dest="wanted", metavar="X.Y", help="tests as a GPU of that compute capability")
    asked = parser.parse_args(arguments)
    checks = chosen(all_checks(asked.wanted), asked.only)
    if not torch.cuda.is_available():
        raise SystemExit("found no CUDA device; the checks need one: `offroad doctor` tells what is there")
    os.environ.setdefault("OMP_NUM_THREADS", THREADS)
    if not asked.wanted and not shutil.which(SANITIZER):
        print(f"left out: memcheck and racecheck, since there is no {SANITIZER} (it comes with CUDA's toolkit)")
    found = run_all(checks, asked.logs, asked.lanes, asked.limit, lambda one: print(one, flush=True))
    failed = sum(outcome.code != 0 for outcome in found)
    print(f"{len(found) - failed} of {len(found)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
