"""Whether a move can finish inside its horizon and deadline: the three conditions, every term by name; pure.

With S bytes of state, d bytes to send per second of generating, D the deadline, H the horizon and
`B_eff = min(path, egress, share of the receiver's line that is promised to nobody, digest rates)`, where live
rounds have of the path what the receiver's `live_share` leaves of the time:

* it converges: `B_eff > d`; or all of the state can go while the world stands, after two rounds for nothing,
* the pause fits: `S/V_source + delta/B + S/V_destination + commit + resume + blocked <= H`. A pausing move
  has the whole line, so B is `min(path, egress, line)`; `delta` is what the last live round leaves behind;
  where a world has waited for others, so that more is left than fits, it is copied once more,
* the whole fits: `open + (S + delta)/(B_eff - d) + turn + block + the rest of the pause <= D`; a world stops
  at its next boundary, a block later at most, and once others that go before have gone on.

What was not measured yet limits nothing, and is named. A dirty rate that nobody knows counts as the whole
state per block; where only that guess refuses a move, it is taken on provisionally, to be measured before its
world stops.
"""

from __future__ import annotations

from math import inf, isinf
from typing import Literal

import msgspec

from worldmove.rests import LEAST_WORK_S, Stops

Condition = Literal["converges", "pause", "deadline"]
ROUNDS = 2
"""Live rounds of all of the state before a world stops for all of it: the first, and one that tells what it
dirties (`rounds`)."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a move asks for, in bytes, seconds and bytes per second; `dirty_rate` is `None` if unknown."""

    state_bytes: int
    live: bool
    block_s: float
    horizon_s: float
    deadline_s: float
    dirty_rate: float | None = None

    @property
    def dirties(self) -> float:
        """Bytes to send per second of generating: as measured, else the whole state per block."""
        if not self.live:
            return 0.0
        return self.state_bytes / self.block_s if self.dirty_rate is None else self.dirty_rate


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """What there is, in bytes per second and seconds; `None`: not measured.

    Attributes:
        path: the rate at which this peer's bytes come by this path.
        line: what the receiver takes in from all peers together.
        egress: what the source may send.
        source_digest: how fast the source reads its state into a table.
        destination_digest: how fast the destination reads it back.
        live_share: of the time, in which live rounds may bring bytes.
        open_s: until the path is open.
        commit_s: to write the record.
        resume_s: until the standby may generate.
        blocked_s: until the grants that are out already have landed.
        turn_s: until others' worlds that have their turn to stop have stopped, and go on.
        cuts: how many turns in which several worlds would stand together are cut in two by this move, or cut
            one of which it is part, by worlds that can only stand alone.
        grain_s: of what has landed, so much may not be known yet.
        switch_s: from the last byte of one world that stands to the first of another, where `line` does not
            tell it.
        held_s: how much longer others may stand: worlds that would go before them are told so much later.
        holds_s: the same for others, because of this one.
    """

    path: float | None = None
    line: float | None = None
    egress: float | None = None
    source_digest: float | None = None
    destination_digest: float | None = None
    live_share: float = 1.0
    open_s: float = 0.0
    commit_s: float = 0.0
    resume_s: float = 0.0
    blocked_s: float = 0.0
    turn_s: float = 0.0
    cuts: int = 0
    grain_s: float = 0.0
    switch_s: float = 0.0
    held_s: float = 0.0
    holds_s: float = 0.0

    @property
    def full_rate(self) -> float:
        """Bytes per second of a move that has the whole line."""
        return _least(self.path, self.line, self.egress)

    @property
    def live_rate(self) -> float:
        """The same while its world generates: the path rests for a part of the time."""
        path = None if self.path is None else self.path * self.live_share
        return _least(path, self.line, self.egress)


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause by its parts, in seconds; `delta_bytes` are sent in it."""

    delta_bytes: float
    source_s: float
    send_s: float
    destination_s: float
    rest_s: float

    @property
    def total_s(self) -> float:
        """The whole pause."""
        return self.source_s + self.send_s + self.destination_s + self.rest_s

    @property
    def work_s(self) -> float:
        """The part that takes the receiver's line and executors."""
        return self.send_s + self.destination_s


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a move is taken on, and every term that was looked at.

    Attributes:
        admissible: it is.
        code: `inadmissible`: not even if it were alone; `gate-full`: not beside what is promised to others.
        condition: the first one that does not hold.
        reason: the same for people.
        required: what the move needs; names end in their unit (`_bytes`, `_bytes_per_s`, `_ms`).
        available: what there is or is allowed, under the same names where the two are compared.
        retry_after_s: when it would be possible, where waiting helps.
        unmeasured: terms that nobody has measured yet.
        provisional: admissible only if the dirty rate turns out lower than the whole state per block.
        pause: what the pause takes.
        span_s: within which all of its bytes have to come.
        turn_s: how long others that want to stop may have to wait for this one.
        stops: how such worlds stop one after another.
        reserved_bytes: what the line may have to bring for it in that time, or to rest for.
    """

    admissible: bool
    pause: Pause
    reserved_bytes: float
    span_s: float
    turn_s: float
    stops: Stops
    code: str | None = None
    condition: Condition | None = None
    reason: str | None = None
    required: dict[str, float] = {}
    available: dict[str, float] = {}
    retry_after_s: float | None = None
    unmeasured: tuple[str, ...] = ()
    provisional: bool = False


def pause_of(demand: Demand, supply: Supply, delta_bytes: float | None = None) -> Pause:
    """What the pause would take.

    Args:
        demand: the move.
        supply: what there is.
        delta_bytes: what is left to send. `None`: what is dirtied in a block and during the last live round's
            digest, and what is dirtied while that is sent, and so on: `d (block + S/V_source) / (1 - d/B)`.
    """
    whole, rate = float(demand.state_bytes), supply.full_rate
    source_s = whole / _or_inf(supply.source_digest)
    if delta_bytes is None:
        dirty, live = demand.dirties, supply.live_rate
        series = dirty * (demand.block_s + source_s) / (1 - dirty / live) if dirty < live else whole
        delta_bytes = min(whole, series) if demand.live else whole
    return Pause(
        delta_bytes=delta_bytes,
        source_s=source_s,
        send_s=delta_bytes / rate,
        destination_s=whole / _or_inf(supply.destination_digest),
        rest_s=supply.commit_s + supply.resume_s + supply.blocked_s,
    )


def judge(demand: Demand, supply: Supply, share: float = inf) -> Verdict:
    """The verdict on one move.

    Args:
        demand: the move.
        supply: what there is.
        share: bytes per second of the receiver's line that are promised to nobody for `span_of` seconds.
    """
    found = _judge(demand, supply, share)
    if found.admissible:
        return found
    if demand.live and demand.dirty_rate is None:
        hoped = _judge(msgspec.structs.replace(demand, dirty_rate=0.0), supply, share)
        if hoped.admissible:
            return msgspec.structs.replace(hoped, provisional=True, unmeasured=found.unmeasured)
    alone = found if isinf(share) else judge(demand, msgspec.structs.replace(supply, turn_s=0.0))
    if not alone.admissible:
        return alone
    free = found.available["share_bytes_per_s"]
    needed = min(found.required.get("bytes_per_s", inf), alone.required["bytes_per_s"])
    short_s = max(needed - free, 0.0) * alone.span_s / supply.full_rate
    return msgspec.structs.replace(
        found,
        code="gate-full",
        reason=f"{found.reason}; {_mb(free)}/s of the line are promised to nobody until then",
        retry_after_s=short_s or supply.turn_s,
    )


def span_of(demand: Demand, supply: Supply) -> float:
    """Seconds within which all bytes of a move have to come, once it is taken on; its deadline is later."""
    pause = pause_of(demand, supply, 0.0)
    turn_s = supply.turn_s if demand.live else 0.0
    return demand.deadline_s - (supply.open_s + turn_s + demand.block_s + pause.total_s)


def stops_of(demand: Demand, supply: Supply) -> Stops:
    """How such worlds stop one after another."""
    return _stops(demand, supply, _longest(demand, supply, pause_of(demand, supply)))


def _judge(demand: Demand, supply: Supply, share: float) -> Verdict:
    """In rounds, until little is left; if that takes too long, the world may stop for all of its state."""
    found = _judge_as(demand, supply, share, pause_of(demand, supply), converges=True)
    if found.admissible or not demand.live:
        return found
    whole = pause_of(demand, supply, float(demand.state_bytes))
    other = _judge_as(demand, supply, share, whole, converges=False)
    hopeful = found.condition != "converges" and demand.dirties < supply.live_rate
    return found if hopeful and not other.admissible else other


def _judge_as(demand: Demand, supply: Supply, share: float, pause: Pause, *, converges: bool) -> Verdict:
    dirty = demand.dirties if converges else 0.0
    whole, span_s = float(demand.state_bytes), span_of(demand, supply)
    copied = (whole if converges else ROUNDS * whole) + pause.delta_bytes if demand.live else whole
    stops = _stops(demand, supply, _longest(demand, supply, pause))
    used = _used(demand, supply, stops, copied)
    alone = supply.live_rate if demand.live else supply.full_rate
    rate = min(alone, share * used, _least(supply.source_digest, supply.destination_digest))
    needed = copied / span_s + dirty if span_s > 0 else inf
    total_s = demand.deadline_s - span_s + (copied / (rate - dirty) if rate > dirty else inf)
    failed = _failed(demand, pause, total_s, converges=converges and rate > dirty)
    return Verdict(
        admissible=failed is None,
        code=None if failed is None else "inadmissible",
        condition=failed,
        reason=_reason(failed, demand, pause, total_s=total_s, rate=rate),
        required=_finite(
            state_bytes=whole,
            bytes_per_s=needed,
            dirty_bytes_per_s=demand.dirties,
            delta_bytes=pause.delta_bytes,
            pause_ms=pause.total_s * 1000,
            source_digest_ms=pause.source_s * 1000,
            send_ms=pause.send_s * 1000,
            destination_digest_ms=pause.destination_s * 1000,
            open_ms=supply.open_s * 1000,
            commit_ms=supply.commit_s * 1000,
            resume_ms=supply.resume_s * 1000,
            blocked_ms=supply.blocked_s * 1000,
            turn_ms=supply.turn_s * 1000,
            total_ms=total_s * 1000,
        ),
        available=_finite(
            bytes_per_s=rate,
            pause_ms=demand.horizon_s * 1000,
            total_ms=demand.deadline_s * 1000,
            path_bytes_per_s=_or_inf(supply.path),
            line_bytes_per_s=_or_inf(supply.line),
            share_bytes_per_s=share * used,
            egress_bytes_per_s=_or_inf(supply.egress),
            source_digest_bytes_per_s=_or_inf(supply.source_digest),
            destination_digest_bytes_per_s=_or_inf(supply.destination_digest),
        ),
        unmeasured=_unmeasured(demand, supply),
        pause=pause,
        reserved_bytes=(copied + dirty * max(span_s, 0.0)) / used,
        span_s=span_s,
        turn_s=demand.block_s + pause.total_s,
        stops=stops,
    )


def _longest(demand: Demand, supply: Supply, pause: Pause) -> Pause:
    """The pause with as much to send as is dirtied while the move waits for its turn, up to what fits it."""
    if not demand.live:
        return pause
    fitting = (demand.horizon_s - (pause.total_s - pause.send_s)) * supply.full_rate
    most = min(fitting, float(demand.state_bytes))
    return pause_of(demand, supply, max(most, pause.delta_bytes))


def _stops(demand: Demand, supply: Supply, pause: Pause) -> Stops:
    return Stops(
        block_s=demand.block_s,
        work_s=pause.work_s,
        room_s=demand.horizon_s - (pause.total_s - pause.work_s),
        late_s=supply.grain_s + supply.held_s,
        aside_s=pause.source_s + pause.destination_s + supply.switch_s,
        span_s=demand.deadline_s,
    )


def _used(demand: Demand, supply: Supply, stops: Stops, copied: float) -> float:
    """The share of the line that such moves can use.

    Where all of the state goes while worlds stand, the line rests until worlds are at their boundaries. Moves
    that copy fill that time; but no more of them end than may stand in turn: each counts at least what it
    would if it were stopped with all that fits its pause.
    """
    if stops.work_s < LEAST_WORK_S or isinf(supply.full_rate):
        return 1.0
    alone_s = stops.rest_s(1)
    turn_s = supply.cuts * alone_s + min(supply.holds_s, alone_s)
    if not demand.live:
        turn_s += stops.work_s * stops.rests()  # of the executors' part as well, in which the line rests, too
        return copied / (copied + turn_s * supply.full_rate)
    turn_s += stops.work_s * (1 + stops.rests())
    return copied / max(copied, turn_s * supply.full_rate)


def _failed(demand: Demand, pause: Pause, total_s: float, *, converges: bool) -> Condition | None:
    if pause.total_s > demand.horizon_s:
        return "pause" if converges or not demand.live else "converges"
    return "deadline" if total_s > demand.deadline_s else None


def _reason(
    failed: Condition | None, demand: Demand, pause: Pause, *, total_s: float, rate: float
) -> str | None:
    if failed is None:
        return None
    horizon, stands = f"horizon_ms is {demand.horizon_s * 1000:g}", f"{pause.total_s * 1000:.0f} ms"
    if failed == "converges":
        return (
            f"the world dirties {_mb(demand.dirties)}/s and {_mb(rate)}/s can be sent; "
            f"with all of its state to send it would stand for {stands}, {horizon}"
        )
    if failed == "pause":
        return f"the world would stand for {stands} ({_mb(pause.delta_bytes)} to send), {horizon}"
    taking = "never end" if isinf(total_s) else f"take {total_s * 1000:.0f} ms"
    return f"at {_mb(rate)}/s the move would {taking}, deadline_ms is {demand.deadline_s * 1000:g}"


def _unmeasured(demand: Demand, supply: Supply) -> tuple[str, ...]:
    names = ("path", "source_digest", "destination_digest")
    found = [name for name in names if getattr(supply, name) is None]
    if demand.live and demand.dirty_rate is None:
        found.append("dirty_rate")
    return tuple(found)


def _finite(**values: float) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if not isinf(value)}


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def _or_inf(rate: float | None) -> float:
    return inf if rate is None else rate


def _least(*rates: float | None) -> float:
    return min(map(_or_inf, rates))
