"""The soak's serving stacks as their parent sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Literal, Self

from worldmove.errors import TransportError
from worldmove.ipc import Channel, socketpair
from worldmove.soak.fleet import MARK, SoakNode, send
from worldmove.soak.news import AnyNews, Failed, Left, Playing, Waiting

Role = Literal["register", "attach", "standby"]
Hear = Callable[["Actor", AnyNews], None]


class Actor:
    """One serving stack: of one world, beside one node.

    Attributes:
        node: beside which it runs.
        playing: the session that it has, or `None`.
        waiting: it stands by.
        failure: why it gave up, `None` if it did not.
        pid: its process.
    """

    def __init__(
        self, node: SoakNode, process: asyncio.subprocess.Process, channel: Channel[AnyNews], hear: Hear
    ) -> None:
        self.node = node
        self.pid = process.pid
        self.playing: str | None = None
        self.waiting = False
        self.failure: Failed | None = None
        self._process = process
        self._channel = channel
        self._hear = hear
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, role: Role, node: SoakNode, *, world: str, session: str, state_mb: int, mark: str, hear: Hear
    ) -> Self:
        """Starts a stack; its news are passed to `hear`."""
        mine, theirs = socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worldmove.soak.actor", "--fd", str(theirs.fileno())),
                *("--parent", str(os.getpid()), "--role", role, "--url", node.url),
                *("--world", world, "--session", session, "--state-mb", str(state_mb)),
                *("--device", node.device),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {MARK: mark},
                start_new_session=True,
            )
        return cls(node, process, Channel(mine, AnyNews), hear)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.returncode is None

    async def _listen(self) -> None:
        with contextlib.suppress(TransportError):
            while True:
                news, _ = await self._channel.receive()
                match news:
                    case Waiting():
                        self.waiting, self.playing = True, None
                    case Playing(session):
                        self.waiting, self.playing = False, session
                    case Left():
                        self.playing = None
                    case Failed():
                        self.failure = news
                self._hear(self, news)
        await self._process.wait()

    async def end(self) -> None:
        """SIGKILL; returns when it is reaped and everything that it told was heard."""
        send(self.pid, signal.SIGKILL)
        await self._process.wait()
        await self._listening
        self._channel.close()
