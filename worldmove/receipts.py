"""The account of one move at its source: times, bytes and roots as they happen; the receipt at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from worldmove import errors
from worldmove import messages as m
from worldmove.dirtying import Dirtying
from worldmove.errors import MoveAbortedError, PeerError, RejectedError, WorldMoveError
from worldmove.hosting.ranks import Pause
from worldmove.ledger.base import Ledger
from worldmove.ledger.records import SessionRecord, fate
from worldmove.machine import Machine
from worldmove.protocol import State
from worldmove.rounds import Taken
from worldmove.timeline import Timeline
from worldmove.views import Damage, MoveState, Receipt, RoundView


def now_text() -> str:
    """The time of day for people, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Account:
    """Collects what the receipt will say. All times in seconds of this process's monotonic clock."""

    def __init__(self, hello: m.Hello, destination: str) -> None:
        self.hello = hello
        self.destination = destination
        self.created_at = now_text()
        self.started = time.monotonic()
        self.timeline = Timeline(self.started, hello.manifest.block_ms)
        self.path: str | None = None
        self.lanes = 0
        self.devices: tuple[tuple[str, str], ...] = ()
        self.gbps: float | None = None
        self.path_reason: str | None = None
        self.destination_incarnation = 0
        self.prepare_ms: float | None = None
        self.block: int | None = None
        self.landed = 0
        self.source_root: str | None = None
        self.receipt: Receipt | None = None
        self._rejected: m.Rejected | None = None
        self._verified: m.Verified | None = None
        self._committed: m.Committed | None = None
        self._adopted: m.Adopted | None = None
        self._record_root: str | None = None
        self._dirtying = Dirtying(hello.manifest.nbytes, hello.manifest.block_ms / 1000)

    @property
    def dirty_rate(self) -> float | None:
        """Bytes to send per second of generating, as the rounds have shown it."""
        return self._dirtying.rate

    def note(self, event: Any) -> None:
        """Keeps what messages of the destination say."""
        if isinstance(event, m.Admitted):
            self.path, self.lanes, self.devices = event.path, event.lanes, event.devices
            self.destination_incarnation = event.incarnation
        elif isinstance(event, m.Prepared):
            self._opened(event)
        elif isinstance(event, m.Rejected):
            self._rejected = event
        elif isinstance(event, m.Progress):
            self.landed = event.bytes
        elif isinstance(event, m.Landed):
            self._dirtying.took(event.bytes)
            self._dirtying.begins(time.monotonic())  # the next round, or the pause, follows at once
        elif isinstance(event, m.Verified):
            self._verified = event
        elif isinstance(event, m.Committed):
            self._committed = event
        elif isinstance(event, m.Adopted):
            self._adopted = event
            self.timeline.resumed(time.monotonic())

    def _opened(self, prepared: m.Prepared) -> None:
        self.path = prepared.path or self.path
        self.gbps = prepared.gbps or None
        self.path_reason = prepared.reason or None
        if self.path == "direct":
            self.lanes = len({region.device for region in self.hello.manifest.regions})
        elif self.path == "local":
            self.lanes = 0

    def prepared(self) -> None:
        """The path is open."""
        self.prepare_ms = self.elapsed_ms
        self._dirtying.begins(time.monotonic())

    def paused(self, pause: Pause) -> None:
        """The world stands."""
        self.block = pause.block
        self.timeline.stopped(pause.block, pause.stopped_at, attended=pause.attended)

    def settled(self, record: SessionRecord) -> None:
        """The record has decided: it knows what was committed, where the destination's word was lost."""
        if fate(record, self.hello.move_id) in ("committed", "adopted", "released"):
            self._record_root = record.root

    @property
    def elapsed_ms(self) -> float:
        """Since the move was asked for."""
        return (time.monotonic() - self.started) * 1000

    def rejection(self, code: str | None, message: str | None) -> WorldMoveError | None:
        """The error for whoever asked, if the move ended before it was admitted."""
        if code is None:
            return None
        if self._rejected is not None:
            return rejection_error(self._rejected)
        if code == "peer":
            return PeerError(message or code)
        return MoveAbortedError(f"{code}: {message}", reason=code)

    async def write(self, ledger: Ledger, machine: Machine, epoch: int) -> None:
        """Makes the receipt and keeps it in the ledger; a rejection leaves none there."""
        self.receipt = self._make(machine, epoch)
        if machine.state is State.REJECTED:
            return
        try:
            await ledger.put_receipt(self.receipt)
        except WorldMoveError as error:
            structlog.get_logger().warning("receipt was not kept", move=self.hello.move_id, error=str(error))

    def _make(self, machine: Machine, epoch: int) -> Receipt:
        facts = machine.facts
        verified = self._verified
        repaired = verified.repair_bytes if verified else 0
        times, pause = self.timeline, self._pause_ms
        rounds = self._rounds(facts.rounds, final=facts.round if verified else None)
        commit = self._committed.commit_ms if self._committed else None
        resume = self._adopted.resume_ms if self._adopted else None
        data = None
        if pause is not None and commit is not None and resume is not None:
            data = pause - commit - resume
        return Receipt(
            migration_id=self.hello.move_id,
            session_id=self.hello.session_id,
            source=self.hello.source,
            destination=self.destination,
            state=move_state(machine.state),
            path=self.path,
            live=self.hello.live,
            epoch=self._committed.epoch if self._committed else epoch,
            block=self.block,
            state_bytes=self.hello.manifest.nbytes,
            sent_bytes=sum(taken.bytes for taken in facts.rounds) + repaired,
            kept_bytes=verified.kept_bytes if verified else 0,
            repair_bytes=repaired,
            copied_bytes=verified.copied_bytes if verified else 0,
            rounds=rounds,
            damaged=tuple(
                Damage(region=leaf.region, leaf=leaf.leaf, attempts=leaf.attempts)
                for leaf in (verified.damaged if verified else ())
            ),
            source_root=self.source_root,
            destination_root=verified.root if verified else self._record_root,
            pause_ms=pause,
            data_ms=data,
            commit_ms=commit,
            resume_ms=resume,
            total_ms=self.elapsed_ms,
            missed=self._missed(),
            lanes=self.lanes,
            finished_at=now_text(),
            code=facts.code,
            reason=facts.message,
            devices=self.devices,
            blocks=times.blocks,
            stopped_ms=times.stopped_ms,
            resumed_ms=times.resumed_ms,
            path_gbps=self.gbps or _brought(rounds),
            path_reason=self.path_reason,
        )

    def _rounds(self, taken: Sequence[Taken], *, final: int | None) -> tuple[RoundView, ...]:
        """The rounds as they went; `final` is the number of the one in the pause, if that was verified."""
        starts = self.timeline.rounds
        return tuple(
            RoundView(
                number=number,
                final=number == final,
                leaves=one.leaves,
                bytes=one.bytes,
                ms=one.ms,
                copied_bytes=one.copied_bytes,
                start_ms=starts[number - 1] if number <= len(starts) else None,
                again_bytes=self._again(one) if number == final else 0,
            )
            for number, one in enumerate(taken, start=1)
        )

    def _again(self, final: Taken) -> int:
        """What a round in the pause sent twice: what the state does not account for."""
        kept = self._verified.kept_bytes if self._verified else 0
        beyond = final.bytes + final.copied_bytes + kept - self.hello.manifest.nbytes
        return min(max(beyond, 0), final.bytes)

    @property
    def _pause_ms(self) -> float | None:
        """Until the adoption: a world that went on here again has not been moved."""
        return self.timeline.pause_ms if self._adopted is not None else None

    def _missed(self) -> bool:
        late = self._pause_ms is not None and self._pause_ms > self.hello.horizon_ms
        return late or (self._adopted is not None and self.elapsed_ms > self.hello.deadline_ms)


def _brought(rounds: Sequence[RoundView]) -> float | None:
    """What the round with the most bytes brought, in 10⁹ bit/s."""
    longest = max(rounds, key=lambda one: one.bytes, default=None)
    return longest.bytes * 8 / longest.ms / 1e6 if longest is not None and longest.ms > 0 else None


def move_state(state: State) -> MoveState:
    """A machine's state in the contract's words; the machine's own waits have none."""
    return state.value  # type: ignore[return-value]


def rejection_error(rejected: m.Rejected) -> WorldMoveError:
    """The error that a destination's rejection stands for, with its details."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, WorldMoveError) and kind.code == rejected.code:
            error = kind(rejected.message)
            # Whatever keys the peer has chosen: as keyword arguments they could clash with the message.
            error.details = dict(rejected.details)
            return error
    unknown = RejectedError(rejected.message)
    unknown.details = {**rejected.details, "reason": rejected.code}
    return unknown
