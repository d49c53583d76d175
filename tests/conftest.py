"""Tests on several cores (`pytest -n`): each worker has its own cores and whole files, the longest first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offroad.device.probe import usable_cores

WORKERS_AT_MOST = 4  # each imports torch and transformers, 1 GB
# Tests of real models, of which the larger one takes most: the beginnings of their ids, and what is in them.
LONGEST = (("tests/model/test_same_tokens", "gemma3"), ("tests/model/test_hf_parity", "gemma3"), ("tests/model/", ""))


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "real models over all prompts, not every second one, and kernels compiled in every kind"
    parser.addoption("--thorough", action="store_true", help=told)
    parser.addoption("--as", dest="as_capability", metavar="X.Y", help="tests/gpu: as a GPU of that compute capability")


def _order(nodeid: str) -> int:
    found = (i for i, (start, part) in enumerate(LONGEST) if nodeid.startswith(start) and part in nodeid)
    return next(found, len(LONGEST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that workers end at about the same time."""
    items.sort(key=lambda item: _order(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Workers take whole files, as with `--dist loadfile`, since most fixtures are a module's; but the files of real
    models, which take half of the time, a model at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, order = nodeid.partition("::")[0], _order(nodeid)
            return f"{file} {order}"

    config.option.loadscopereorder = False  # that would begin with the files of many tests
    return Files(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """What `-n auto` means: a worker for each core that this process may use, control group quotas included."""
    return min(WORKERS_AT_MOST, usable_cores())


def _keep_to_own_cores() -> None:
    """Binds this worker, and what it starts, to its share of the cores. torch, whose threads spin while they wait, and
    offroad's kernels count their threads by it. Runs before torch is imported; without xdist it does nothing."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if not worker.removeprefix("gw").isdigit() or count < 2:
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if own := cores[int(worker.removeprefix("gw")) :: count]:
        os.environ["OMP_NUM_THREADS"] = str(len(own))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, own)


def _interpret_triton() -> None:
    """Without a GPU Triton's kernels run in its interpreter. That has to be known before anything imports Triton, whose
    own functions are made for one or the other, and torch and transformers may do so."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        os.environ["TRITON_INTERPRET"] = "1"


_keep_to_own_cores()
_interpret_triton()
