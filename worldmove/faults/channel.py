"""A control connection to which faults happen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from worldmove import messages as m
from worldmove.driver import PeerChannel
from worldmove.errors import ConnectionLostError
from worldmove.faults.lies import LIES
from worldmove.faults.points import Fault, Kind

NOISE = 0xA5
OTHER_VERSION = 99

Pick = Callable[[type[m.Message]], Fault | None]
Steal = Callable[[m.Begin], Awaitable[None]]


class FaultyChannel:
    """Passes messages on, and does to them what is due.

    Args:
        inner: the connection.
        pick: takes the fault that is due for a message of some type, if there is one.
        steal: uses up the one-time tokens of an offer.
        silence_s: after how long a connection that carries nothing is lost.
    """

    def __init__(self, inner: PeerChannel, pick: Pick, steal: Steal, silence_s: float) -> None:
        self._inner = inner
        self._pick = pick
        self._steal = steal
        self._silence_s = silence_s
        self._lost = ""
        self._mute = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    @property
    def move_id(self) -> str:
        """As the connection's."""
        return self._inner.move_id

    def cut(self) -> None:
        """Closes the connection."""
        self._lost = "the connection was cut"
        self._closing = asyncio.get_running_loop().create_task(self._inner.close(1011, self._lost))

    def mute(self) -> None:
        """From now on nothing comes or goes; after the peer's time the connection is found to be lost."""
        self._mute.set()

    async def send(self, message: bytes) -> None:
        """Sends one message, or what has become of it."""
        if self._lost:
            raise ConnectionLostError(self._lost)
        sent = m.decode(message)
        fault = self._pick(type(sent))
        for data in [message] if fault is None else await self._altered(sent, message, fault):
            if not self._mute.is_set():
                await self._inner.send(data)

    async def _altered(self, message: m.Message, data: bytes, fault: Fault) -> list[bytes]:
        plain = {
            "drop": [],
            "twice": [data, data],
            "garble": [bytes(byte ^ NOISE for byte in data)],
            "lie-version": [bytes([OTHER_VERSION]) + data[1:]],
            "delay": [data],
            "steal-token": [data],
        }
        if fault.what == "delay":
            await asyncio.sleep(fault.ms / 1000)
        if fault.what == "steal-token" and isinstance(message, m.Begin):
            await self._steal(message)
        if fault.what in plain:
            return plain[fault.what]
        return [m.encode(LIES[fault.what][type(message)](message))]

    async def receive(self) -> bytes:
        """The next message that gets through."""
        coming = asyncio.ensure_future(self._inner.receive())
        muted = asyncio.ensure_future(self._mute.wait())
        try:
            await asyncio.wait((coming, muted), return_when=asyncio.FIRST_COMPLETED)
            if not self._mute.is_set():
                return await coming
            await asyncio.sleep(self._silence_s)
            self._lost = "nothing came from the peer"
            raise ConnectionLostError(self._lost)
        finally:
            muted.cancel()
            coming.cancel()
            await asyncio.wait((coming, muted))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Closes; never raises."""
        await self._inner.close(code, reason)


def suits(fault: Fault, message: type[m.Message]) -> bool:
    """Whether a fault can happen to a message of this type."""
    if fault.what == "delay":
        return message is not m.Progress  # said by the way: what the phase is for would go on at once
    if fault.kind is not Kind.CHANNEL or fault.what in ("cut", "mute"):
        return False
    if fault.what == "steal-token":
        return message is m.Begin
    return fault.what not in LIES or message in LIES[fault.what]
