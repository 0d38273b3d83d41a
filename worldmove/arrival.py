"""What a destination tells its node's intake of one move, and what it waits for there."""

from __future__ import annotations

import time
from collections.abc import Callable

from worldmove import messages as m
from worldmove.dirtying import Dirtying
from worldmove.intake import Intake
from worldmove.manifest import LeafMap
from worldmove.paths import Path
from worldmove.rates import COMMIT, RESUME

RATED_BYTES = 16 << 20


class Arrival:
    """One move on its way in.

    Args:
        intake: of the node.
        hello: the move.
        note_rate: told (path, bytes, seconds) of rounds that say something about the path.
        min_gbps: slower paths are refused.
    """

    def __init__(
        self, intake: Intake, hello: m.Hello, note_rate: Callable[[str, int, float], None], min_gbps: float
    ) -> None:
        self._intake = intake
        self._hello = hello
        self._note_rate = note_rate
        self._min_gbps = min_gbps
        self._path: Path | None = None
        self._dirtying = Dirtying(hello.manifest.nbytes, hello.manifest.block_ms / 1000)
        self._verified_at: float | None = None
        self._adopts_at: float | None = None
        self._at_once = False
        self._told_at: float | None = None

    @property
    def dirty_rate(self) -> float | None:
        """Bytes to send per second of generating: as this move shows, or as its source has said."""
        said = self._hello.terms.dirty_bytes_per_s if self._hello.terms is not None else None
        return said if self._dirtying.rate is None else self._dirtying.rate

    async def opened(self, path: Path, leaf_map: LeafMap) -> None:
        """The way to the bytes is open; returns when they may come; raises as `Intake.confirm`."""
        self._path = path
        await self._intake.confirm(self._hello.move_id, path, leaf_map)
        if not self._hello.live:
            await self.turn()

    async def turn(self) -> None:
        """Waits until the source may stop the world, which it does as soon as it hears of this."""
        await self._intake.turn(self._hello.move_id)
        self._told_at = time.monotonic()
        if self._path is not None:
            self._path.stand(self._hello.horizon_ms / 1000)

    def begins(self, *, final: bool) -> None:
        """A round begins; a final one is of a world that stands."""
        now = time.monotonic()
        self._dirtying.begins(now)
        told_at, self._told_at = self._told_at, None
        if final and self._path is not None:
            self._path.stand(self._hello.horizon_ms / 1000)
            self._intake.stands(self._hello.move_id, None if told_at is None else now - told_at)

    def landed(self, nbytes: int) -> None:
        """Bytes have landed."""
        self._intake.landed(self._hello.move_id, nbytes)

    def read(self, nbytes: int, seconds: float) -> None:
        """So much of what was kept was read back."""
        self._intake.note_digest("destination", self._hello.manifest, nbytes, seconds)

    def round(self, nbytes: int, seconds: float) -> str | None:
        """What a round brought; says why the path is too slow, where it is."""
        self._dirtying.took(nbytes)
        if self._path is None or nbytes < RATED_BYTES:
            return None
        name = self._path.name
        self._note_rate(name, nbytes, seconds)
        self._intake.note_round(name, self._hello.source, nbytes, seconds)
        gbps = nbytes * 8 / seconds / 1e9
        if gbps >= self._min_gbps:
            return None
        return f"path {name} brought {gbps:.2f} Gb/s; --min-gbps asks for {self._min_gbps:g}"

    def verified(self) -> None:
        """Memory equals the source's: nothing more has to come, and the record is written next."""
        self._intake.came(self._hello.move_id)
        self._verified_at = time.monotonic()

    def committed(self) -> float:
        """The record was written, as a rule as `adopted` already; how long that took, in milliseconds."""
        now = self._adopts_at = time.monotonic()
        self._at_once = True
        seconds = now - (self._verified_at or now)
        self._intake.note_time(COMMIT, seconds)
        return seconds * 1000

    def found_committed(self) -> None:
        """The reply to the commit was lost: the record has told of it, just now or after `committed`."""
        self._adopts_at = self._adopts_at or time.monotonic()

    def waits(self) -> None:
        """Nobody takes the world yet: when it goes on says nothing about the next move."""
        self._at_once = False

    def adopted(self) -> float:
        """The world generates here; how long that took since the commit was known, in milliseconds."""
        now = time.monotonic()
        seconds = now - (self._adopts_at or now)
        if self._at_once:
            self._intake.note_time(RESUME, seconds)
        self.runs()
        return seconds * 1000

    def runs(self) -> None:
        """The world generates again, here or there; or never."""
        self._intake.runs(self._hello.move_id)

    def over(self) -> None:
        """The move has failed, and nothing of it is left: before others hear that there is room again."""
        self._intake.over(self._hello.move_id)
