"""A GPU as its executor uses it: what is attached, and work that is begun here and finishes by itself."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import cupy
import numpy as np

from worldmove.cuda.memory import Device, Window
from worldmove.errors import TransportError, ValidationError
from worldmove.executor.messages import (
    HIDDEN,
    NO_ACCESS,
    OPEN,
    CopyPiece,
    Digest,
    Fill,
    Land,
    Piece,
    Shift,
)
from worldmove.ipc import map_shared
from worldmove.kernels.leaf_digest_cuda import DigestPlan, LeafDigest
from worldmove.kernels.pieces import make_pieces
from worldmove.kernels.runs import make_runs
from worldmove.kernels.runs_cuda import RunKernels
from worldmove.kernels.shifts import Scratch, launches
from worldmove.kernels.streams import DEFAULT_DIRECTION, Begun, begin_copies, begun
from worldmove.manifest import DIGEST_BYTES

MAX_PLANS = 256
"""Digests that are kept ready; the oldest make room."""


class Attached(NamedTuple):
    """Memory that the device can reach.

    Attributes:
        address: as the device sees it. nbytes: how much of it there is.
        owner: keeps it: a mapping of GPU memory, or of a memory file that was registered with the driver.
    """

    address: int
    nbytes: int
    writable: bool
    owner: Window | mmap.mmap


class Gpu:
    """One device. Everything but construction belongs to one thread, which calls `use` first.

    Copies and kernels run on streams of their own, so that they overlap: who needs one after the other
    asks for the second when the first is done.

    Args:
        uuid: of the device.
        spoil: damages what lands first (`worldmove.executor.faults`).

    Raises:
        DeviceError: it can't be used.
    """

    def __init__(self, uuid: str, *, spoil: bool = False) -> None:
        self._device = Device(uuid)
        self._spoil = spoil
        self._memory: dict[int, Attached] = {}
        self.use()
        self._copying = cupy.cuda.Stream(non_blocking=True)
        self._computing = cupy.cuda.Stream(non_blocking=True)
        self._landing = cupy.cuda.Stream(non_blocking=True)
        self._digests = LeafDigest()
        self._runs = RunKernels()
        self._plans: dict[tuple[Piece, ...], DigestPlan] = {}
        self._digests.warm_up()
        self._runs.warm_up()

    def use(self) -> None:
        """Makes the device the calling thread's own."""
        cupy.cuda.Device(self._device.info.ordinal).use()

    def measure(self) -> tuple[int, int]:
        """Free and total bytes."""
        return self._device.free()

    def check(self) -> None:
        """Whoever was refused asks why: where the context is lost, whatever is asked for next is refused too.

        Raises:
            DeviceError: it is lost.
        """
        begun(self._computing).done()

    def reach(self, others: Sequence[str]) -> tuple[int, ...]:
        """Whether memory of other GPUs can be mapped here: of each `HIDDEN`, `NO_ACCESS` or `OPEN`."""
        access = self._device.access(others)
        return tuple(HIDDEN if one is None else OPEN if one else NO_ACCESS for one in access)

    def attach(self, key: int, fd: int, nbytes: int, *, writable: bool, device: bool) -> None:
        """Makes memory reachable under `key`.

        Raises:
            ValidationError: the key is taken.
            DeviceError, TransportError: the descriptor can't be mapped.
        """
        if key in self._memory:
            raise ValidationError(f"memory {key} is attached already", field="key")
        if device:
            mapping = self._device.map(fd, nbytes)
            self._memory[key] = Attached(mapping.address, nbytes, writable, mapping)
            return
        try:
            mapped = map_shared(fd, nbytes, writable=True, populate=True)
        except (OSError, ValueError) as error:
            raise TransportError(f"memory {key} of {nbytes} bytes cannot be mapped: {error}") from error
        try:
            address = self._device.register(_address_of(mapped), nbytes)
        except BaseException:
            mapped.close()
            raise
        self._memory[key] = Attached(address, nbytes, writable, mapped)

    def detach(self, key: int) -> None:
        """Unmaps; nothing may be at work on it."""
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        self._plans = {
            pieces: plan for pieces, plan in self._plans.items() if all(piece.key != key for piece in pieces)
        }
        if isinstance(memory.owner, mmap.mmap):
            self._device.unregister(_address_of(memory.owner))
        memory.owner.close()

    def allocate(self, nbytes: int) -> tuple[int, Window, Begun]:
        """Makes device memory and begins to clear it.

        Returns:
            A descriptor and a mapping, both the caller's; they are ready when the work is done.

        Raises:
            NoMemoryError, DeviceError: see `Device.create`.
        """
        fd = self._device.create(nbytes)
        try:
            mapping = self._device.map(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        stream = self._computing
        cupy.cuda.runtime.memsetAsync(mapping.address, 0, mapping.nbytes, stream.ptr)
        return fd, mapping, begun(stream)

    def digest(self, request: Digest) -> Begun:
        """Begins to write the digests of all leaves of the pieces into the table's rows.

        Raises:
            ValidationError: a piece lies outside its memory, or its rows outside the table.
        """
        return self._read(request.table, request.seed, request.pieces, self._computing)

    def prepare(self, wanted: tuple[Piece, ...]) -> None:
        """Keeps ready what a digest of these pieces takes, until one of their keys is detached.

        Raises:
            ValidationError: a piece lies outside its memory.
        """
        with self._computing:
            plan = self._plan(wanted)
        # Streams that use it later do not wait for this one.
        self._computing.synchronize()
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[wanted] = plan

    def _plan(self, wanted: Sequence[Piece]) -> DigestPlan:
        addresses = [self._at(piece.key, piece.offset, piece.length) for piece in wanted]
        pieces = make_pieces(
            addresses,
            [piece.length for piece in wanted],
            [piece.leaf_bytes for piece in wanted],
            [piece.first_leaf for piece in wanted],
        )
        return self._digests.plan(pieces)

    def _read(self, key: int, seed: int, wanted: tuple[Piece, ...], stream: cupy.cuda.Stream) -> Begun:
        first = min((piece.first_leaf for piece in wanted), default=0)
        rows = max((piece.first_leaf + piece.leaves for piece in wanted), default=0)
        self._at(key, first * DIGEST_BYTES, 0)
        table = self._at(key, 0, rows * DIGEST_BYTES, writable=True)
        with stream:
            plan = self._plans.get(wanted) or self._plan(wanted)
            self._digests.digest(plan, seed, table, beside=stream is self._landing)
        return begun(stream, plan)

    def land(self, request: Land) -> Begun:
        """Begins to copy, and to digest what has landed after that; raises as `copy` and `digest`."""
        copied = self.copy(request.pieces)
        self._landing.wait_event(copied.event)
        if self._spoil and request.read:
            self._spoil = False
            self._flip_bit(request.read[0])
        read = self._read(request.table, request.seed, request.read, self._landing)
        return Begun(read.event, (copied, read))

    def _flip_bit(self, piece: Piece) -> None:
        """In what has landed, where it lies."""
        address = self._at(piece.key, piece.offset + piece.length // 2, 1, writable=True)
        byte = np.zeros(1, dtype=np.uint8)
        stream = self._landing
        cupy.cuda.runtime.memcpyAsync(byte.ctypes.data, address, 1, DEFAULT_DIRECTION, stream.ptr)
        stream.synchronize()
        byte ^= np.uint8(1)
        cupy.cuda.runtime.memcpyAsync(address, byte.ctypes.data, 1, DEFAULT_DIRECTION, stream.ptr)
        stream.synchronize()

    def copy(self, pieces: Sequence[CopyPiece]) -> Begun:
        """Begins to copy: large pieces by a copy engine, all small ones by one kernel.

        Raises:
            ValidationError: a piece lies outside its memory, or overlaps itself.
        """
        copies = []
        for piece in _joined(pieces):
            source = self._at(piece.source_key, piece.source_offset, piece.length)
            target = self._at(piece.key, piece.offset, piece.length, writable=True)
            if abs(source - target) < piece.length:
                raise ValidationError(f"{piece} overlaps itself", field="pieces")
            copies.append((source, target, piece.length))
        return begin_copies(self._runs, self._copying, copies)

    def shift(self, request: Shift) -> Begun:
        """Begins to copy piece after piece, each with what the ones before have left; raises as `copy`.

        A piece may overlap itself. Kernels of one stream follow each other: launches that depend on none of
        their own runs' order keep that of the pieces (`kernels.shifts`).
        """
        copies = [
            (
                self._at(piece.source_key, piece.source_offset, piece.length),
                self._at(piece.key, piece.offset, piece.length, writable=True),
                piece.length,
            )
            for piece in request.pieces
        ]
        room = None
        if request.scratch is not None:
            room = Scratch(self._at(*request.scratch, writable=True), request.scratch.nbytes)
        with self._copying:
            plans = self._runs.plans(launches(copies, room))
            for plan in plans:
                self._runs.copy(plan)
        return begun(self._copying, plans)

    def fill(self, request: Fill) -> Begun:
        """Begins to set the bytes of every range; raises as `copy`."""
        targets = [self._at(request.key, offset, length, writable=True) for offset, length in request.ranges]
        lengths = [length for _, length in request.ranges]
        with self._computing:
            plan = self._runs.plan(make_runs([0] * len(targets), targets, lengths))
            self._runs.fill(plan, request.byte)
        return begun(self._computing, plan)

    def _at(self, key: int, offset: int, length: int, *, writable: bool = False) -> int:
        memory = self._memory.get(key)
        if memory is None:
            raise ValidationError(f"memory {key} is not attached", field="key")
        if offset < 0 or length < 0 or offset + length > memory.nbytes:
            raise ValidationError(
                f"bytes {offset} to {offset + length} of memory {key} with {memory.nbytes}", field="offset"
            )
        if writable and not memory.writable:
            raise ValidationError(f"memory {key} is read-only", field="key")
        return memory.address + offset


def _joined(pieces: Sequence[CopyPiece]) -> Iterator[CopyPiece]:
    """Pieces, with those in one of which each begins, at both ends, where the last one has ended."""
    last: CopyPiece | None = None
    for piece in pieces:
        if last is not None and piece[:4] == (
            last.source_key,
            last.source_offset + last.length,
            last.key,
            last.offset + last.length,
        ):
            last = last._replace(length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _address_of(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
