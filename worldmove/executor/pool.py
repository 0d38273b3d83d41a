"""The executors of one device, or of the host's memory: who does what, and in which order.

Everything is decided synchronously on the node's event loop; executors only do what they are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial

from worldmove.errors import ManifestError, ProcessLostError, TransportError, ValidationError
from worldmove.executor import messages as m
from worldmove.executor import work
from worldmove.executor.attached import Attached
from worldmove.executor.crew import Crew, EventSink, Memory, disown
from worldmove.executor.jobs import Board, Job, Part
from worldmove.executor.kinds import HOST, Kind
from worldmove.executor.messages import CopyPiece, Done, Order, Piece, Request
from worldmove.executor.parts import part_size
from worldmove.executor.process import STALL_S
from worldmove.manifest import DIGEST_BYTES
from worldmove.shortage import shortage

__all__ = ["CopyPiece", "ExecutorPool", "Piece"]

MIN_HASHED = 64 << 10
"""So many bytes of a table take an executor about as long as to wake another one."""
FEW_PARTS = 8
"""So many of the smallest parts are one where somebody begins with the first: a node takes a third of a
millisecond for each, at either end."""
REPLACED_S = 10.0
"""Within that a lost executor is replaced, unless the system refuses to start one."""


class ExecutorPool:
    """Digests, copies and wipes attached memory in processes of its own.

    Args:
        processes: how many executors.
        nice: added to their scheduling priority, so that worlds go first.
        stall_s: an executor that owes answers and gives none for so long is ended and replaced.
        on_event: told `executor-started`, `executor-lost` and `executor-given-up`, with the pid.
        kind: whose memory they work on.
    """

    def __init__(
        self,
        processes: int,
        *,
        nice: int = 5,
        stall_s: float = STALL_S,
        on_event: EventSink | None = None,
        kind: Kind = HOST,
    ) -> None:
        self._count = processes
        self._kind = kind
        self._board = Board()
        self._crew = Crew(processes, nice, stall_s, self._pump, on_event=on_event, kind=kind)
        self._attached = Attached(self._crew, self._board)
        self._room = asyncio.Event()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """The living executors' processes."""
        return [executor.pid for executor in self._crew.alive()]

    @property
    def host(self) -> ExecutorPool:
        """The pool of host memory, as `Executors.host`: this one, where it stands alone."""
        return self

    def of(self, device: str) -> ExecutorPool:
        """The pool of a device, as `Executors.of`.

        Raises:
            ManifestError: it is another device's.
        """
        if device != self._kind.device:
            raise ManifestError(
                f"device {device!r} is not on this node; allowed: {self._kind.device!r}", field="device"
            )
        return self

    async def start(self) -> None:
        """Starts all executors; returns when they take requests.

        Raises:
            ProcessLostError: one can't be started; none is left behind.
        """
        await self._crew.start()

    async def close(self) -> None:
        """Finishes the jobs that are there, takes no new ones, and ends all executors.

        Cancelling the wait does not stop it.
        """
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def abort(self) -> None:
        """Ends all executors at once and fails all jobs; never waits. `close` afterwards reaps them."""
        self._closed = True
        self._crew.kill()
        self._pump()

    @property
    def arms(self) -> bool:
        """Whether executors take `armed_parts`: a GPU's do."""
        return self._kind.device != HOST.device

    def release(self, key: int, *, begin: bool) -> None:
        """What is armed for page `key` and has not begun begins now, or not at all; never waits."""
        for executor in self._crew.alive():
            self._crew.ask(executor, partial(m.Release, key=key, begin=begin))

    async def attach(
        self, fd: int, nbytes: int, *, writable: bool, device: bool = False, watched: bool = False
    ) -> int:
        """Maps memory in every executor, populated, now and in those that replace one.

        Args:
            fd: stays the caller's; the pool keeps a duplicate until `detach`.
            nbytes: how much of it.
            writable: false maps it read-only; copies and fills into it then fail.
            device: it is a GPU's memory, that this device can reach; otherwise a memory file.
            watched: it is a control page, that `armed_parts` name.

        Returns:
            The key for `Piece`, `CopyPiece` and the like. A key is never used again.

        Raises:
            TransportError: the descriptor can't be duplicated.
            ValidationError, NoMemoryError: an executor can't map it; nothing stays attached.
            ProcessLostError: the pool is closed.
        """
        self._check_open()
        try:
            memory = Memory(os.dup(fd), nbytes, writable, device, watched)
        except OSError as error:
            short = shortage("memory for an executor", nbytes, error)
            raise short or TransportError(f"descriptor {fd} cannot be attached: {error}") from error
        return await self._attached.attach(memory)

    async def allocate(self, nbytes: int) -> int:
        """Makes memory of the device, all zero; an executor that is being replaced is waited for.

        Returns:
            A descriptor that the caller owns. Cancelling the wait leaves nothing behind.

        Raises:
            NoMemoryError: the device has not that much.
            ValidationError: these executors have no device.
            ProcessLostError: the executor died meanwhile, or is not replaced in time.
        """
        await self._manned()
        return (await self._ask(partial(m.Allocate, nbytes=nbytes), nbytes)).fds[0]

    async def measure(self) -> tuple[int, int]:
        """Free and total bytes of the device; raises as `allocate`."""
        free, total = (await self._ask(m.Measure, 0)).sizes
        return free, total

    async def reach(self, devices: Sequence[str]) -> tuple[int, ...]:
        """Of each of these other GPUs `HIDDEN`, `NO_ACCESS` or `OPEN`; raises as `allocate`."""
        return (await self._ask(partial(m.Reach, devices=tuple(devices)), 0)).sizes

    async def _manned(self) -> None:
        """Returns when an executor takes requests, or none can be waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLACED_S):
                while not (self._crew.alive() or self._crew.hopeless or self._closed):
                    self._room.clear()
                    await self._room.wait()

    async def _ask(self, make: Callable[[int], Request], nbytes: int) -> Done:
        """Asks one executor something that touches no attached memory."""
        self._check_open()
        executor = next(iter(self._crew.alive()), None)
        if executor is None:
            raise ProcessLostError("there is no executor now")
        answer = self._crew.ask(executor, make, nbytes=nbytes)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(disown)
            raise

    async def detach(self, key: int) -> None:
        """Unmaps memory everywhere, once nothing touches it any more.

        From the call on no job may name it; those that are there are finished first. Cancelling the
        wait does not stop it.

        Raises:
            ValidationError: the key isn't attached.
        """
        await self._attached.detach(key)

    async def settle(self, key: int) -> None:
        """Returns when no queued or running job touches memory `key`.

        After a cancelled or failed job this is the way to be sure that nothing of it is written any
        more: what had not begun was dropped at once, what had begun is waited for.
        """
        await self._board.quiet(key)

    async def digest(
        self,
        table: int,
        seed: int,
        pieces: Sequence[Piece],
        *,
        urgent: bool = False,
        on_part: Callable[[list[Piece]], None] | None = None,
    ) -> None:
        """Digests `pieces` into the leaf table attached as `table`; returns when all entries are written.

        Args:
            table: key of a `LeafTable`'s memory, attached writable.
            seed: of XXH3, 0 to 2**64 - 1.
            pieces: in any order; they may be cut at leaves.
            urgent: goes before everything that isn't.
            on_part: called on the event loop with pieces whose digests are in the table, as they get done.

        Raises:
            ValidationError: a piece lies outside its memory or its digests outside the table.
            ProcessLostError: an executor died meanwhile (it is reaped and replaced); entries of pieces
                that `on_part` did not name are undefined.
        """
        await self.perform(self.plan_digest(table, seed, pieces), urgent=urgent, on_part=on_part)

    def plan_digest(self, table: int, seed: int, pieces: Sequence[Piece], *, few: bool = False) -> list[Part]:
        """The parts of a `digest`, for `prepare` and `perform`; raises ValidationError as `digest`.

        `few`: on a GPU few parts, for somebody who has to do something with each, and waits for the last.
        """
        self._attached.check_digest(table, pieces)
        size = self._part_size(sum(piece.length for piece in pieces))
        size = max(size, FEW_PARTS * self._kind.smallest_part) if few and self.arms else size
        return work.digest_parts(table, seed, pieces, size)

    async def copy(self, pieces: Sequence[CopyPiece], *, urgent: bool = False, order: Order = False) -> None:
        """Copies memory. Within one piece of host memory, source and target may overlap.

        Args:
            pieces: copied in any order, several at once: none may touch what another one writes.
            urgent: as in `digest`.
            order: one after the other: a piece may read what an earlier one has written, and overlap itself.

        Raises:
            ValidationError: a piece lies outside its memory, or its target is read-only.
            ProcessLostError: an executor died meanwhile; the targets are undefined.
        """
        self._attached.check_copies(pieces)
        size = self._part_size(sum(piece.length for piece in pieces))
        await self._run(work.move_parts(pieces, size, order), urgent=urgent)

    def plan_land(
        self, copies: Sequence[CopyPiece], reads: Sequence[Piece], table: int, seed: int
    ) -> list[Part]:
        """Parts that copy, and read back each target once it has landed.

        Args:
            copies: as for `copy`.
            reads: what each of them has written, one for one.
            table: as for `digest`.
            seed: as for `digest`.

        Raises:
            ValidationError: as `copy` and `digest`.
        """
        self._attached.check_digest(table, reads)
        self._attached.check_copies(copies)
        size = self._part_size(sum(copy.length for copy in copies))
        return work.land_parts(table, seed, copies, reads, size)

    async def prepare(self, parts: Sequence[Part]) -> None:
        """Has a GPU's executor get ready for what `parts` digest: it will be asked for soon."""
        if not self.arms:
            return
        answers = [
            self._crew.ask(executor, partial(m.Prepare, pieces=tuple(part.pieces)))
            for executor in self._crew.alive()
            for part in parts
        ]
        if answers:
            await asyncio.wait(answers)

    async def perform(
        self,
        parts: Sequence[Part],
        *,
        urgent: bool = False,
        on_part: Callable[[list[Piece]], None] | None = None,
    ) -> None:
        """Does what was planned, once; arguments and errors as `digest`, a detached key included."""
        for part in parts:
            for key in part.keys:
                self._attached.get(key)
        await self._run(parts, urgent=urgent, on_part=on_part)

    async def fill(self, key: int, byte: int, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Sets bytes of memory `key` to `byte`: wipes it.

        Args:
            key: the memory.
            byte: 0 to 255.
            ranges: (offset, length) of what is set; all of it if left out.

        Raises:
            ValidationError: it isn't attached, or read-only, or a range lies outside, or `byte` isn't one.
            ProcessLostError: an executor died meanwhile; the contents are undefined.
        """
        wanted = [(0, self._attached.get(key).nbytes)] if ranges is None else ranges
        for offset, length in wanted:
            self._attached.check(key, offset, length, writable=True)
        if not 0 <= byte <= 255:
            raise ValidationError(f"byte is {byte}; 0 to 255 are allowed", field="byte")
        size = self._part_size(sum(length for _, length in wanted))
        await self._run(work.fill_parts(key, byte, wanted, size))

    async def region_digests(
        self, table: int, ranges: Sequence[tuple[int, int]], *, urgent: bool = False
    ) -> list[bytes]:
        """BLAKE2b-256 of the concatenated leaf digests of each (first leaf, count) of a table, in order.

        Raises:
            ValidationError: a range lies outside the table.
            ProcessLostError: an executor died meanwhile.
        """
        for first, count in ranges:
            self._attached.check(table, first * DIGEST_BYTES, count * DIGEST_BYTES)
        total = sum(count for _, count in ranges) * DIGEST_BYTES
        parts = work.hash_parts(table, ranges, max(-(-total // self._count), MIN_HASHED))
        await self._run(parts, urgent=urgent)
        return [digest for part in parts if part.done is not None for digest in part.done.digests]

    async def _run(
        self,
        parts: Sequence[Part],
        *,
        urgent: bool = False,
        on_part: Callable[[list[Piece]], None] | None = None,
    ) -> None:
        self._check_open()
        if not parts:
            return
        job = Job(parts, urgent=urgent, on_part=on_part)
        self._board.add(job)
        self._pump()
        try:
            await job.ended
        finally:
            # Nothing is left of an ended job; a cancelled one takes back what has not begun.
            self._board.drop(job)
            if job.ended.done() and not job.ended.cancelled():
                job.ended.exception()

    def _pump(self) -> None:
        """Hands out parts while an executor has room."""
        self._room.set()
        if self._crew.hopeless:
            self._board.drop_all(ProcessLostError("there is no executor, and none will be started"))
        while True:
            free = [one for one in self._crew.alive() if one.outstanding < self._kind.window]
            part = self._board.take() if free else None
            if part is None:
                return
            executor = min(free, key=lambda executor: executor.outstanding)
            answer = self._crew.ask(executor, part.make, nbytes=part.nbytes)
            answer.add_done_callback(partial(self._finished, part))

    def _finished(self, part: Part, answer: asyncio.Future[Done]) -> None:
        self._board.finish(part, answer.exception() or answer.result())

    def _part_size(self, nbytes: int) -> int:
        kind = self._kind
        return part_size(nbytes, self._count, kind.smallest_part, kind.largest_part, kind.alone)

    async def _close(self) -> None:
        await self._board.idle()
        await self._crew.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ProcessLostError("the executors are closed")
