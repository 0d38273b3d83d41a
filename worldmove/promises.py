"""What a receiver has promised to the moves that it took on: bytes of its line until their deadlines; pure.

The line serves whoever has to be done first (`granting.policy`). So all promises are kept when, for every
deadline, what is owed until then fits into what the line brings until then.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from math import inf

import msgspec

from worldmove.admission import Demand, Supply, Verdict, judge, span_of, stops_of
from worldmove.rests import Stops


class Promise(msgspec.Struct, kw_only=True):
    """One admitted move: bytes that it may still have to send until `deadline` (seconds, the caller's clock).

    `pause_bytes` of them are sent while its world stands, ahead of moves with an earlier deadline; others may
    have to wait for `turn_s` until they may stop theirs. `stops` says how worlds like it stop; where only one
    may stand at once, `cuts` says that somebody has counted that it cuts a turn of others in two.
    """

    name: str
    deadline: float
    left: float
    pause_bytes: float
    turn_s: float = 0.0
    stops: Stops | None = None
    cuts: bool = False

    @property
    def alone(self) -> bool:
        """Only one such world may stand at once."""
        return self.stops is not None and self.stops.together == 1

    @property
    def turns(self) -> bool:
        """Such worlds stand together, and the receiver rests before they do."""
        return self.stops is not None and self.stops.together > 1 and not self.stops.flows


class Promises:
    """All promises of one receiver's line."""

    def __init__(self) -> None:
        self._by_name: dict[str, Promise] = {}
        self._order: list[Promise] = []

    def __len__(self) -> int:
        return len(self._order)

    def judge(self, demand: Demand, supply: Supply, now: float) -> Verdict:
        """The verdict on a move that is asked for at `now`; promises nothing."""
        turn_s = max((one.turn_s for one in self._order), default=0.0)
        supply = msgspec.structs.replace(self._beside(demand, supply), turn_s=turn_s)
        due = now + span_of(demand, supply)
        verdict = judge(demand, supply, inf if supply.line is None else self.share(supply.line, due, now))
        last_s = self.last_s(now)
        if verdict.retry_after_s is None or last_s == 0:
            return verdict
        return msgspec.structs.replace(verdict, retry_after_s=min(verdict.retry_after_s, last_s))

    def last_s(self, now: float) -> float:
        """Seconds until nothing is owed any more to those that are there."""
        return max(self._order[-1].deadline - now, 0.0) if self._order else 0.0

    def _beside(self, demand: Demand, supply: Supply) -> Supply:
        """What there is, with what those that were taken on mean for when worlds may stop."""
        others = [one.stops for one in self._order if one.stops is not None]
        if not others:
            return supply
        stops = stops_of(demand, supply)
        held_s = max(max(one.room_s for one in others) - stops.room_s, 0.0)
        holds_s = max((stops.room_s - one.room_s for one in others if one.flows), default=0.0)
        cuts = self._cuts(stops._replace(late_s=stops.late_s + held_s))
        return msgspec.structs.replace(supply, held_s=held_s, holds_s=max(holds_s, 0.0), cuts=cuts)

    def _cuts(self, stops: Stops) -> int:
        """Turns that are cut in two where worlds that stand together meet such that stand alone."""
        if stops.together == 1:
            return int(any(one.turns for one in self._order))
        return 0 if stops.flows else sum(one.alone and not one.cuts for one in self._order)

    def admit(self, name: str, demand: Demand, supply: Supply, now: float) -> Verdict:
        """As `judge`; an admissible move gets its promise."""
        verdict = self.judge(demand, supply, now)
        if verdict.admissible:
            self.promise(name, verdict, now)
        return verdict

    def promise(self, name: str, verdict: Verdict, now: float) -> None:
        """Takes what a verdict of `now` reserves into the books, in place of what its name had."""
        self.drop(name)
        stops = verdict.stops
        crowd = any(one.turns for one in self._order)
        if stops.together > 1 and not stops.flows:
            for one in self._order:
                one.cuts = True
        self._put(
            Promise(
                name=name,
                deadline=now + verdict.span_s,
                left=verdict.reserved_bytes,
                pause_bytes=verdict.pause.delta_bytes,
                turn_s=verdict.turn_s,
                stops=stops,
                cuts=stops.together == 1 and crowd,
            )
        )

    def owe(self, name: str, nbytes: float, deadline: float, pause_bytes: float = 0.0) -> None:
        """As `promise`, for so many bytes, of a move that neither waits nor is waited for."""
        self._put(Promise(name=name, deadline=deadline, left=nbytes, pause_bytes=pause_bytes))

    def _put(self, one: Promise) -> None:
        self.drop(one.name)
        self._by_name[one.name] = one
        insort(self._order, one, key=lambda each: each.deadline)

    def landed(self, name: str, nbytes: int) -> None:
        """Some of what was promised has come."""
        promise = self._by_name.get(name)
        if promise is not None:
            promise.left = max(promise.left - nbytes, 0.0)
            promise.pause_bytes = min(promise.pause_bytes, promise.left)

    def owes(self, name: str, nbytes: float) -> None:
        """The move knows better now: at most `nbytes` are still to come."""
        promise = self._by_name.get(name)
        if promise is not None:
            promise.left = nbytes
            promise.pause_bytes = min(promise.pause_bytes, nbytes)

    def drop(self, name: str) -> None:
        """The move is over, however it ended."""
        promise = self._by_name.pop(name, None)
        if promise is not None:
            self._order.remove(promise)

    def share(self, line: float, deadline: float, now: float) -> float:
        """Bytes per second, on average until `deadline`, that are promised to nobody.

        Args:
            line: what the receiver takes in, bytes per second.
            deadline: of the one who asks.
            now: on the same clock.
        """
        span = deadline - now
        if span <= 0:
            return 0.0
        at = bisect_right(self._order, deadline, key=lambda one: one.deadline)
        owed = sum(one.left for one in self._order[:at])
        ahead = sum(one.pause_bytes for one in self._order[at:])
        free = line * span - owed - ahead
        for one in self._order[at:]:
            owed += one.left
            ahead -= one.pause_bytes
            free = min(free, line * (one.deadline - now) - owed - ahead)
        return max(free, 0.0) / span

    def reserved(self, now: float) -> float:
        """Bytes per second that the promises need until their deadlines, added up."""
        return sum(one.left / (one.deadline - now) for one in self._order if one.deadline > now)
