"""The demo's progress: a bar on a terminal, a line per step elsewhere, nothing where a program reads."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Screen:
    """Progress of one demo; a context manager."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, text: str, done: float, total: int) -> None:
        """Begins, or goes on with, a stage of `total` steps, `done` of them and a part of the next."""
        self._progress.update(self._task, description=text, completed=done, total=total)

    def say(self, text: str, *, trouble: bool = False) -> None:
        """A line that stays; trouble is told even where a program reads."""
        if trouble or not self._quiet:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
