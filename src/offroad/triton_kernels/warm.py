"""Compiles Triton kernels before they are needed: what would be launched is collected, then compiled in parallel.

A kernel is compiled once for each specialisation: types, constants, and which sizes and addresses are multiples of 16.
`collect` runs functions that launch kernels, on tensors without memory (the meta device), and keeps of each launch what
its specialisation is made of. Nothing is written down twice: what is collected is what the functions themselves ask
for. Compiled code is kept on disk by Triton, by source, options and architecture; see `folder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from offroad.errors import PlanError

_log = logging.getLogger(__name__)
Report = Callable[[int, int], None]  # how many are done, and how many there are


class TritonCompileError(PlanError):
    """A kernel that the plan needs was refused by the compiler, or by the device."""


@dataclass(frozen=True)
class Launch:
    """A kernel with arguments of one specialisation; `key` names both."""

    function: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]
    key: str

    def compile(self, load: bool) -> None:
        """Compiles it for the current device, or finds it on disk; with `load` it is ready to be launched."""
        kernel = self.function.warmup(*self.args, grid=(1,), **self.options)
        if load:
            _ = kernel.run  # makes what passes arguments, and loads the code into the device


@dataclass
class Launches:
    """What was collected, each specialisation once."""

    found: dict[tuple, Launch] = field(default_factory=dict)

    def note(self, function: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        _, _, _, _, binder = function.device_caches[driver.active.get_current_device()]
        _, specialization, given = binder(*args, **options)
        key = (id(function), tuple(specialization), str(given))
        if key not in self.found:
            named = ", ".join(f"{p.name}={kind}" for p, kind in zip(function.params, specialization, strict=True))
            self.found[key] = Launch(function, args, options, f"{_name(function)}({named}) {given}")

    def keys(self) -> set[str]:
        return {launch.key for launch in self.found.values()}


@contextmanager
def collect(launches: Launches) -> Iterator[None]:
    """Launches of Triton kernels in this block are noted, and nothing runs: one thread's, since it is the method that
    launches which is replaced."""

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.note(self, args, options)

    launch = JITFunction.run
    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def _parsed_one_at_a_time() -> Iterator[None]:
    """Threads in this block parse kernels' sources one after the other: Python 3.11 counts how deep `ast.parse` is for
    all threads at once, and raises SystemError when they change places within it (python/cpython issue 106905)."""
    lock, parse = Lock(), JITFunction.parse

    def locked(self: JITFunction) -> Any:
        with lock:
            return parse(self)

    JITFunction.parse = locked
    try:
        yield
    finally:
        JITFunction.parse = parse


@dataclass
class Compiled:
    """How many kernels were compiled, and how many found on disk; the others were in the process already."""

    compiled: int = 0
    cached: int = 0


def compile_all(launches: Launches, threads: int, report: Report, load: bool = True) -> Compiled:
    """Compiles what was collected, `threads` at a time: most of the time goes to compilers that hold no Python lock.
    Raises TritonCompileError."""
    counts, lock, before = Compiled(), Lock(), triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **more: Any) -> None:
        with lock:
            counts.cached += cache_hit
            counts.compiled += not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **more)

    for launch in launches.found.values():
        _ = launch.function.cache_key  # of the source and all that it calls: found once, by this thread
    triton.knobs.compilation.listener = listen
    try:
        with _parsed_one_at_a_time(), ThreadPoolExecutor(max(1, threads), thread_name_prefix="triton") as pool:
            futures = {pool.submit(launch.compile, load): launch for launch in launches.found.values()}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    _done(future, futures[future])
                    report(done, len(futures))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        triton.knobs.compilation.listener = before
    return counts


def _done(future: Future[None], launch: Launch) -> None:
    try:
        future.result()
    except Exception as error:  # compilers, drivers and linkers raise what they like
        raise TritonCompileError(
            f"Triton kernel {launch.key}",
            found=f"{type(error).__name__}: {error}",
            accepted="a kernel that compiles and that the device can hold",
            next="see `offroad doctor`; Triton needs a C compiler and Python's headers",
        ) from error


class Late:
    """Counts kernels that are compiled, or read from disk, from `watch` on, and warns of each: those that were not
    collected. `count` only grows."""

    def __init__(self) -> None:
        self.count = 0
        self.watching = self.hooked = False

    def watch(self) -> None:
        """Begins to count."""
        if not self.hooked:
            self.hooked, before = True, triton.knobs.runtime.jit_post_compile_hook

            def hook(*, key: Any, repr: str, fn: Any, **more: Any) -> Any:
                if self.watching:
                    self.count += 1
                    _log.warning("kernel compiled while requests run, which prepare should have done: %s %s", repr, key)
                return None if before is None else before(key=key, repr=repr, fn=fn, **more)

            triton.knobs.runtime.jit_post_compile_hook = hook
        self.watching = True

    def rest(self) -> None:
        """Ends counting, while another model is prepared."""
        self.watching = False


LATE = Late()


def folder() -> str:
    """Where Triton keeps compiled kernels."""
    return str(triton.knobs.cache.dir)


def _name(function: JITFunction) -> str:
    return f"{function.module}.{function.fn.__qualname__}"
