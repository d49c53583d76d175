"""What a user sees while a model is loaded: a bar for each phase on stderr, or lines where that is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

PHASES = ("pull", "plan", "prepare", "load")


class LoadProgress:
    """Shows `(phase, fraction, note)` reports: a context manager that is called by `Engine` and by downloads.

    A phase is done when a later one begins, or when the block ends without an exception.
    """

    def __init__(self, phases: tuple[str, ...] = PHASES, stream: TextIO | None = None) -> None:
        self.phases, self.stream = phases, stream or sys.stderr
        self.current: str | None = None
        self.tasks: dict[str, int] = {}
        self.bars = None

    def __enter__(self) -> LoadProgress:
        if self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self.bars = Progress(
                TextColumn("{task.description:<8}"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(file=self.stream),
            )
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        elif self.bars is not None:
            self.bars.stop()

    def finish(self) -> None:
        """Marks the last phase as done and ends the display; the terminal is free afterwards. May be called twice."""
        if self.current is not None:
            self._finish(self.current)
            self.current = None
        if self.bars is not None:
            self.bars.stop()

    def __call__(self, phase: str, fraction: float, note: str = "") -> None:
        """Reports that `phase` is done to `fraction` (0 to 1)."""
        assert phase in self.phases, phase
        if phase != self.current:
            if self.current is not None:
                self._finish(self.current)
            self.current = phase
            self._begin(phase, note)
        if self.bars is not None:
            self.bars.update(self.tasks[phase], completed=min(1.0, fraction), note=note)

    def _begin(self, phase: str, note: str) -> None:
        if self.bars is None:
            print(f"{phase:<8} {note}".rstrip(), file=self.stream, flush=True)
        elif phase not in self.tasks:
            self.tasks[phase] = self.bars.add_task(phase, total=1.0, note=note)

    def _finish(self, phase: str) -> None:
        if self.bars is not None:
            self.bars.update(self.tasks[phase], completed=1.0)
            self.bars.stop_task(self.tasks[phase])
