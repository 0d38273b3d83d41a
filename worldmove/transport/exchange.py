"""The two sides of a leased lane on a connection: one answers pulls, the other makes them.

Nothing here knows UCX or processes. Each side watches the other: something must arrive within the
stall deadline (beats see to that when there is nothing to say), and a transfer under way must move on
chunk by chunk. So the slowest path that works carries about four chunks a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, TransportError
from worldmove.kernels.leaf_digest import DIGEST_BYTES, digest_leaves, leaf_count
from worldmove.manifest import DEFAULT_LEAF
from worldmove.transport import framing
from worldmove.transport.account import Account
from worldmove.transport.base import Buffer, Connection, Incoming, on_host, take
from worldmove.transport.bounces import Bounces
from worldmove.transport.faults import Faults
from worldmove.transport.framing import DEPTH, Chunk, Kind, Spans
from worldmove.transport.pulling import Pulling, Sized
from worldmove.transport.table import RegionTable, Sizes

BEATS = 5
"""Beats in one stall deadline."""


class Exchange:
    """What both sides share: numbered messages, beats, the stall deadline.

    Args:
        connection: opened and authenticated (`welcome` or `introduce`).
        table: the lease's regions.
        stall_s: longest silence, and longest time for the next chunk of a transfer, in seconds.

    Attributes:
        account: where the time goes, as far as a kind of lane notes it.
    """

    chunk_bytes = framing.CHUNK
    """The longest `DATA`."""

    def __init__(self, connection: Connection, table: Sizes, stall_s: float) -> None:
        self._connection = connection
        self._table = table
        self._stall = stall_s
        self._loop = asyncio.get_running_loop()
        # The opening was message 0 of each direction.
        self._sent = self._received = 1
        self._spoken = self._heard = self._moved = self._loop.time()
        self._ended = False
        self._violated: FramingError | None = None
        self.account = Account()

    def follow(self, sent: int, received: int) -> None:
        """So many messages went out and came in before, the openings included."""
        self._sent, self._received = sent, received

    async def run(self) -> None:
        """Serves the connection; returns when the peer has closed it with nothing left to do.

        Raises:
            TransportError: the connection broke, or the peer broke the protocol.
            DeadlineError: the peer is silent or its transfer has stalled.
        """
        tasks = [self._loop.create_task(part) for part in self._parts()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (TransportError, DeadlineError) as error:
            if self._ended:
                return
            if isinstance(error, FramingError):
                self._violated = error
                await self._complain(str(error))
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._ended = True

    async def close(self, deadline_s: float) -> None:
        """Ends the connection cleanly. Raises as `Connection.close`."""
        self._ended = True
        await self._connection.close(deadline_s)

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [self._listen(), self._watch()]

    async def _on(self, kind: Kind, incoming: Incoming) -> None:
        raise NotImplementedError

    def _in_transfer(self) -> bool:
        raise NotImplementedError

    def _send(self, kind: Kind, buffer: Buffer) -> asyncio.Future[None]:
        tag = framing.tag_of(kind, self._sent)
        self._sent += 1
        self._spoken = self._loop.time()
        return self._connection.send(tag, buffer)

    async def _listen(self) -> None:
        while (incoming := await self._connection.receive()) is not None:
            kind = framing.read_tag(incoming.tag, incoming.nbytes, self._received, self.chunk_bytes)
            self._received += 1
            self._heard = self._loop.time()
            if kind is Kind.BEAT:
                await incoming.into(memoryview(bytearray()))
            elif kind is Kind.ERROR:
                reason = (await take(incoming)).decode(errors="replace")
                raise TransportError(f"the other lane ended the transfer: {reason}")
            else:
                await self._on(kind, incoming)

    async def _watch(self) -> None:
        period = self._stall / BEATS
        while not self._ended:
            before = self._loop.time()
            await asyncio.sleep(period)
            now = self._loop.time()
            if now - before > 2 * period:
                # This process stood still; its peer can't be blamed for what was missed meanwhile.
                self._heard = self._moved = now
            if now - self._spoken >= period and not self._ended:
                self._send(Kind.BEAT, memoryview(b""))
            if now - self._heard > self._stall:
                raise DeadlineError(f"nothing came from the other lane for {self._stall} s")
            if self._in_transfer() and now - self._moved > self._stall:
                raise DeadlineError(f"the transfer stood still for {self._stall} s")

    async def _complain(self, reason: str) -> None:
        """Tells the peer why this side ends the connection; best effort, bounded."""
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(min(self._stall, 1.0)):
                await self._send(Kind.ERROR, memoryview(reason.encode()[: framing.MAX_ERROR]))
                await self._connection.close(min(self._stall, 1.0))


class Server(Exchange):
    """Answers pulls: sends what was pulled, in the order it was pulled, and nothing unasked."""

    depth = DEPTH
    """Messages on their way at once."""

    def __init__(self, connection: Connection, table: Sizes, stall_s: float, faults: Faults) -> None:
        super().__init__(connection, table, stall_s)
        self._faults = faults
        self._pulls: asyncio.Queue[Spans] = asyncio.Queue()
        self._slots = asyncio.Semaphore(self.depth)
        self._in_flight = 0

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._parts(), self._serve()]

    def _in_transfer(self) -> bool:
        return self._in_flight > 0

    async def _on(self, kind: Kind, incoming: Incoming) -> None:
        if kind is not Kind.PULL:
            raise FramingError(f"{kind.name} came to a lane that serves pulls")
        if self._pulls.qsize() >= framing.MAX_PULLS:
            raise FramingError(f"more than {framing.MAX_PULLS} pulls at once")
        spans = framing.unpack_spans(await take(incoming))
        self._table.check(spans)
        self._pulls.put_nowait(spans)

    async def _serve(self) -> None:
        raise NotImplementedError

    async def _turn(self) -> None:
        """Returns when the next message may be sent."""
        await self._slots.acquire()
        await self._faults.pause(self._stall)

    def _ship(self, data: Buffer, done: Callable[[], None]) -> None:
        """Sends one message, after `_turn`; `done` is called when its memory may be changed again."""
        if self._in_flight == 0:
            self._moved = self._loop.time()
        self._in_flight += 1

        def shipped(_: asyncio.Future[None]) -> None:
            self._in_flight -= 1
            self._moved = self._loop.time()
            self._slots.release()
            done()

        self._send(Kind.DATA, self._damaged(data)).add_done_callback(shipped)
        if unasked := self._faults.unasked():
            self._send(Kind.DATA, memoryview(unasked))

    def _damaged(self, data: Buffer) -> Buffer:
        """The message as it is to be sent: other than it should be only in tests."""
        return self._faults.damage(on_host(data))


class Source(Server):
    """Sends from the regions' own memory; small pieces are gathered.

    Args:
        connection, table, stall_s: see `Exchange`.
        faults: damage to do.
        leave: waits until so many bytes may be sent; `None`: at once.
    """

    def __init__(
        self,
        connection: Connection,
        table: RegionTable,
        stall_s: float,
        faults: Faults,
        leave: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(connection, table, stall_s, faults)
        self._memory = table
        self._bounces = Bounces()
        self._leave = leave

    async def _serve(self) -> None:
        while True:
            for chunk in framing.plan(await self._pulls.get()):
                if self._leave is not None:
                    await self._leave(chunk.nbytes)
                await self._turn()
                if len(chunk.pieces) == 1:
                    self._ship(self._memory.view(chunk.pieces[0]), lambda: None)
                else:
                    bounce = await self._bounces.take()
                    self._ship(self._memory.gather(chunk, bounce), partial(self._bounces.give, bounce))


Part = TypeVar("Part", bound=Sized)


class Puller(Exchange, Generic[Part]):
    """Makes pulls, and accepts exactly what they asked for."""

    def __init__(self, connection: Connection, table: Sizes, stall_s: float) -> None:
        super().__init__(connection, table, stall_s)
        self._due: deque[tuple[Pulling, Part]] = deque()
        self._open: set[Pulling] = set()
        self._resting = self._stood = False
        self.on_stood: Callable[[int], None] = lambda _block: None

    def pull(self, spans: Spans) -> asyncio.Future[int]:
        """Asks for spans; they are landed in this table's memory when the future completes.

        Returns:
            A future with the number of bytes. Cancelling it doesn't stop the transfer.

        Raises:
            FramingError: a span leaves its region, or too many pulls are under way.
            ConnectionLostError: the connection has ended.
        """
        return self._ask(spans).landed

    def rest(self) -> None:
        """What is pulled next waits for a world to stand: no deadline runs until `wake`, or the answer."""
        self._resting |= not self._open

    def wake(self) -> None:
        """The world stands; what was pulled is due from now on."""
        if self._resting:
            self._resting, self._moved = False, self._loop.time()

    def _ask(self, spans: Spans) -> Pulling:
        self._table.check(spans)
        if self._violated is not None:  # and not that the connection is closed: that is only what came of it
            raise self._violated
        if len(self._open) >= framing.MAX_PULLS:
            raise FramingError(f"more than {framing.MAX_PULLS} pulls at once")
        if self._ended:
            raise ConnectionLostError("the other lane has ended the transfer")
        chunks = self._cut(spans)
        pull = Pulling(framing.check_volume(spans), len(chunks))
        if not chunks:
            pull.landed.set_result(0)
            return pull
        self._send(Kind.PULL, memoryview(spans.tobytes()))
        if not self._open:
            self._moved = self._loop.time()
        self._open.add(pull)
        self._due.extend((pull, chunk) for chunk in chunks)
        return pull

    def _cut(self, spans: Spans) -> list[Part]:
        """The messages in which a pull is answered."""
        raise NotImplementedError

    async def run(self) -> None:
        """As `Exchange.run`; pulls that are under way fail with what ended it."""
        try:
            await super().run()
            self._check_idle()
        except (TransportError, DeadlineError) as error:
            for pull in self._open:
                pull.over.set()
                if not pull.landed.done():
                    pull.landed.set_exception(error)
            raise

    async def close(self, deadline_s: float) -> None:
        """As `Exchange.close`; pulls under way are landed first, also those that nobody waits for."""
        try:
            async with asyncio.timeout(deadline_s):
                for pull in tuple(self._open):
                    await pull.over.wait()
        except TimeoutError:
            raise DeadlineError(f"pulls did not land within {deadline_s} s") from None
        await super().close(deadline_s)

    def _in_transfer(self) -> bool:
        return bool(self._open) and not self._resting

    async def _on(self, kind: Kind, incoming: Incoming) -> None:
        self.wake()
        if kind is Kind.STOOD and not self._stood:
            self._stood = True
            self.on_stood(framing.unpack_stood(await take(incoming)))
            return
        if kind is not Kind.DATA:
            raise FramingError(f"{kind.name} came to a lane that pulls")
        if not self._due:
            raise FramingError(f"{incoming.nbytes} bytes came that nobody pulled")
        pull, chunk = self._due[0]
        if incoming.nbytes != chunk.nbytes:
            raise FramingError(f"a chunk of {incoming.nbytes} bytes came where {chunk.nbytes} were pulled")
        self._due.popleft()
        await self._land(pull, chunk, incoming)

    async def _land(self, pull: Pulling, chunk: Part, incoming: Incoming) -> None:
        """Receives a message that is due; `_landed` is called when its bytes lie where they belong."""
        raise NotImplementedError

    def _check_idle(self) -> None:
        if self._open:
            raise ConnectionLostError("the other lane closed with pulls under way")

    def _landed(self, pull: Pulling) -> None:
        self._heard = self._moved = self._loop.time()
        pull.left -= 1
        if pull.left == 0:
            self._open.discard(pull)
            pull.over.set()
            if not pull.landed.done():
                pull.landed.set_result(pull.nbytes)


class ChunkPuller(Puller[Chunk]):
    """Pulls in the messages that `framing.plan` makes."""

    def _cut(self, spans: Spans) -> list[Chunk]:
        return list(framing.plan(spans))


class Destination(ChunkPuller):
    """Receives into the regions' own memory; gathered pieces are scattered.

    `inline` digests each message where it was received, and throws that away: what it costs, for benchmarks.
    """

    def __init__(
        self, connection: Connection, table: RegionTable, stall_s: float, *, inline: bool = False
    ) -> None:
        super().__init__(connection, table, stall_s)
        self._inline = inline
        self._memory = table
        self._bounces = Bounces()

    async def _land(self, pull: Pulling, chunk: Chunk, incoming: Incoming) -> None:
        bounce = await self._bounces.take() if len(chunk.pieces) > 1 else None
        buffer = self._memory.view(chunk.pieces[0]) if bounce is None else bounce[: chunk.nbytes]

        def landed(future: asyncio.Future[None]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            if self._inline:
                count = leaf_count(len(buffer), DEFAULT_LEAF)
                digest_leaves(buffer, DEFAULT_LEAF, 0, memoryview(bytearray(count * DIGEST_BYTES)))
            if bounce is not None:
                self._memory.scatter(chunk, bounce)
                self._bounces.give(bounce)
            self._landed(pull)

        incoming.into(buffer).add_done_callback(landed)
