"""What all serving stacks of the demo do: generate at the clock of their blocks, wait for the next world."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from worldmove.demo.news import Generated, Left, Line, Waiting
from worldmove.demo.player import Key, action
from worldmove.errors import DeadlineError, SessionMoved

W_co = TypeVar("W_co", covariant=True)


class View(Protocol):
    """A world as its player sees it."""

    @property
    def block(self) -> int:
        """Number of the last finished block; 0 before the first."""

    def step(self, keys: Key, /) -> npt.NDArray[np.uint8]:
        """Generates the next block; returns its pictures."""


class Standby(Protocol[W_co]):
    """A standby, or that of a nested state."""

    def wait(self) -> W_co | None:
        """Waits until a world is handed over."""


class Clock:
    """Says when the next block is due. What a late one has lost is not made up for."""

    def __init__(self, every_ms: float) -> None:
        self._every = every_ms / 1000
        self._due = time.monotonic()

    def wait(self) -> None:
        """Returns when the next block is due."""
        self._due = max(self._due + self._every, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))


def options_of(program: str, *more: str) -> argparse.ArgumentParser:
    """The command line that all actors share, and `more` options with a word each."""
    parser = argparse.ArgumentParser(prog=program)
    for name in ("--fd", "--parent"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--url", "--session", *more):
        parser.add_argument(name, required=True)
    parser.add_argument("--role", choices=("world", "standby"), required=True)
    return parser


def generate(
    view: View,
    every_ms: float,
    parent: Line,
    *,
    writing: Callable[[], AbstractContextManager[object]],
    boundary: Callable[[], None],
) -> None:
    """Generates a block every `every_ms` and tells it, until the world has moved.

    Args:
        view: the world.
        every_ms: between the beginnings of two blocks.
        parent: who is told.
        writing: the context in which a block is generated.
        boundary: called after each block; raises SessionMoved at the end.
    """
    clock = Clock(every_ms)
    while True:
        began = time.perf_counter()
        with writing():
            pictures = view.step(action(view.block + 1).keys)
        took = (time.perf_counter() - began) * 1000
        parent.tell(Generated(view.block, pictures.tobytes(), took))
        try:
            boundary()
        except SessionMoved as moved:
            parent.tell(Left(moved.destination, view.block))
            return
        clock.wait()


def handed_over(standby: Standby[W_co], parent: Line) -> W_co:
    """Waits as a standby until a world comes.

    Raises:
        DeadlineError: never, since it waits without a limit.
    """
    parent.tell(Waiting())
    world = standby.wait()
    if world is None:
        raise DeadlineError("a wait without a time-out ended")
    return world
