"""The demo's actors as their parent sees them: started, listened to, ended with every trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from worldmove.demo.film import Film
from worldmove.demo.news import Any as AnyNews
from worldmove.demo.news import Failed, Generated, Left, Playing, Waiting, environment
from worldmove.errors import ConnectionLostError, DeadlineError, ProcessLostError, WorldMoveError
from worldmove.ipc import Channel, socketpair

END_TIMEOUT_S = 10.0


class Actor:
    """One child process and what it has told.

    Attributes:
        node: the node beside which it runs.
        pid: its process.
        waiting: it stands by, and nothing has been handed to it since.
        playing: it has the world.
        block: the last block that it generated.
        block_ms: how long its blocks took to generate, one after another.
    """

    def __init__(self, node: str, process: asyncio.subprocess.Process, channel: Channel[AnyNews]) -> None:
        self.node = node
        self.pid = process.pid
        self.waiting = False
        self.playing = False
        self.block = 0
        self.block_ms: list[float] = []
        self._process = process
        self._channel = channel

    @classmethod
    async def start(cls, node: str, module: str, *arguments: str) -> Self:
        """Starts `python -m module` with a line to this process.

        It is out of reach of the terminal's Ctrl-C: only its parent ends it.
        """
        mine, theirs = socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment(),
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        return cls(node, process, Channel(mine, AnyNews))

    async def listen(self, hear: Callable[[Actor, AnyNews], None]) -> None:
        """Passes every news on until the process ends.

        Raises:
            ProcessLostError: it ended with an error, or said that it gives up.
        """
        failed: Failed | None = None
        with contextlib.suppress(ConnectionLostError):
            while True:
                news, _ = await self._channel.receive()
                if isinstance(news, Failed):
                    failed = news
                else:
                    self._note(news)
                    hear(self, news)
        code = await self._process.wait()
        if failed is not None:
            raise ProcessLostError(
                f"the actor beside node {self.node} gave up: {failed.reason}", cause=failed.code
            )
        if code != 0:
            raise ProcessLostError(f"the actor beside node {self.node} ended with status {code}")

    def _note(self, news: AnyNews) -> None:
        match news:
            case Waiting():
                self.waiting = True
            case Playing(block=block):
                self.waiting, self.playing, self.block = False, True, block
            case Generated(block, _, ms):
                self.block = block
                self.block_ms.append(ms)
            case Left():
                self.playing = False

    async def end(self) -> None:
        """Ends the process: asks it, and after `END_TIMEOUT_S` insists."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class Cast:
    """All actors of a demo and the film that they make; a context manager that ends them.

    Args:
        film: takes every block that any of them generates.
        on_block: called after each block with the actor that generated it.

    Attributes:
        film: as given.
        actors: by node.
    """

    def __init__(self, film: Film, on_block: Callable[[Actor], None] | None = None) -> None:
        self.film = film
        self.actors: dict[str, Actor] = {}
        self._on_block = on_block
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: WorldMoveError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(actor.end() for actor in self.actors.values()))

    async def enter(self, node: str, module: str, *arguments: str) -> Actor:
        """Starts an actor beside `node`."""
        actor = await Actor.start(node, module, *arguments)
        self.actors[node] = actor
        self._tasks[node] = asyncio.create_task(self._follow(actor))
        return actor

    async def _follow(self, actor: Actor) -> None:
        try:
            await actor.listen(self._hear)
        except WorldMoveError as error:
            self._failure = self._failure or error
        finally:
            self._changed.set()

    def _hear(self, actor: Actor, news: AnyNews) -> None:
        if isinstance(news, Generated):
            self.film.add(news.block, actor.node, news.pictures)
            if self._on_block is not None:
                self._on_block(actor)
        elif isinstance(news, Playing) and news.state:
            self.film.states[news.block] = news.state
        self._changed.set()

    @property
    def owner(self) -> Actor | None:
        """The actor that has the world; `None` while it is between two."""
        return next((actor for actor in self.actors.values() if actor.playing), None)

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Waits for something that the actors' news bring about.

        Raises:
            DeadlineError: not after `timeout_s` seconds; `what` says what was awaited.
            ProcessLostError: an actor failed before.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._failure is not None:
                        raise self._failure
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineError(f"{what} did not happen within {timeout_s:g} s") from error
