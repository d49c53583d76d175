"""Each worker of `pytest -n` gets its own cores, so that workers do not take each other's."""

from __future__ import annotations

import os

from offroad.device.probe import usable_cores

WORKERS_AT_MOST = 4  # each imports torch and transformers, 1 GB


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


_keep_to_own_cores()
