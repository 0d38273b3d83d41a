"""The memory that a pool's jobs may name: attached under keys, and the check that they stay inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worldmove.errors import ValidationError
from worldmove.executor.crew import Crew, Memory
from worldmove.executor.jobs import Board
from worldmove.executor.messages import CopyPiece, Piece
from worldmove.executor.work import check_rows


class Attached:
    """What is attached to every executor of a crew.

    Args:
        crew: maps it.
        board: knows which keys jobs touch.
    """

    def __init__(self, crew: Crew, board: Board) -> None:
        self._crew = crew
        self._board = board
        self._leaving: set[int] = set()
        self._next_key = 1

    async def attach(self, memory: Memory) -> int:
        """The key of memory that all executors have mapped; its descriptor is the crew's.

        Raises:
            ValidationError, NoMemoryError: an executor can't map it; nothing stays attached.
        """
        key, self._next_key = self._next_key, self._next_key + 1
        try:
            await self._crew.attach(key, memory)
        except BaseException:
            self._leaving.add(key)
            self._crew.later(self._forget(key))
            raise
        return key

    async def detach(self, key: int) -> None:
        """Unmaps it once no job touches it; from the call on no new one may.

        Raises:
            ValidationError: the key isn't attached.
        """
        self.get(key)
        self._leaving.add(key)
        await asyncio.shield(self._crew.later(self._forget(key)))

    async def _forget(self, key: int) -> None:
        await self._board.quiet(key)
        try:
            await self._crew.detach(key)
        finally:
            self._leaving.discard(key)

    def get(self, key: int) -> Memory:
        """The memory of a key; ValidationError if none is attached under it."""
        memory = self._crew.memory.get(key)
        if memory is None or key in self._leaving:
            raise ValidationError(f"memory {key} is not attached", field="key")
        return memory

    def check(self, key: int, offset: int, length: int, *, writable: bool = False) -> None:
        """Raises ValidationError where bytes lie outside the memory, or can't be written."""
        self.get(key).check(key, offset, length, writable=writable)

    def check_digest(self, table: int, pieces: Sequence[Piece]) -> None:
        """Raises ValidationError where a piece lies outside its memory, or its digests outside the table."""
        for piece in pieces:
            self.check(piece.key, piece.offset, piece.length)
        check_rows(pieces, self.get(table).nbytes)

    def check_copies(self, pieces: Sequence[CopyPiece]) -> None:
        """Raises ValidationError where a piece lies outside its memory, or its target is read-only."""
        for piece in pieces:
            self.check(piece.source_key, piece.source_offset, piece.length)
            self.check(piece.key, piece.offset, piece.length, writable=True)
