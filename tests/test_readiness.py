"""What a commit waits for: asked for once, and again only where the answer is old."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from worldmove import readiness
from worldmove.errors import DeadlineError
from worldmove.readiness import Readiness
from worldmove.sessions import Berth
from worldmove.tasks import Tasks


class Asked:
    """Stands where a berth does, and counts."""

    def __init__(self) -> None:
        self.kept = 0
        self.heard = 0
        self.answers = asyncio.Event()
        self.silent = False

    async def keep(self) -> None:
        self.kept += 1
        await self.answers.wait()

    async def answer(self, timeout_s: float) -> None:
        self.heard += 1
        await self.answers.wait()
        if self.silent:
            raise DeadlineError(f"no sign of life within {timeout_s} s")


def made(asked: Asked) -> tuple[Readiness, Berth, list[str], list[BaseException]]:
    failed: list[str] = []
    errors: list[BaseException] = []
    ready = Readiness(Tasks(errors.append), lambda code, _message: failed.append(code), 5.0)
    return ready, cast(Berth, asked), failed, errors


async def test_what_was_asked_for_before_the_stop_is_not_asked_for_again() -> None:
    asked = Asked()
    ready, berth, failed, _ = made(asked)
    ready.begin(berth)
    await asyncio.sleep(0)
    ready.begin(berth)  # it is still on its way
    asked.answers.set()
    assert await ready.reached(berth)
    ready.begin(berth)  # it was answered just now
    assert await ready.reached(berth)
    assert (asked.kept, asked.heard) == (1, 1)
    assert failed == []


async def test_an_answer_that_has_become_old_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    asked.answers.set()
    ready, berth, _, _ = made(asked)
    ready.begin(berth)
    assert await ready.reached(berth)
    now = time.monotonic() + 2 * readiness.SIGN_OF_LIFE_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ready.begin(berth)
    assert await ready.reached(berth)
    assert (asked.kept, asked.heard) == (2, 2)
    now += 2 * readiness.SIGN_OF_LIFE_S
    assert await ready.reached(berth)
    assert (asked.kept, asked.heard) == (2, 3)


async def test_a_silent_worker_gives_the_move_up() -> None:
    asked = Asked()
    asked.silent = True
    asked.answers.set()
    ready, berth, failed, errors = made(asked)
    ready.begin(berth)
    assert not await ready.reached(berth)
    assert failed == ["worker-lost"]
    assert [type(error) for error in errors] == [DeadlineError]
