"""What a node takes in: moves are judged by what was measured, and hold a promise until they are over.

The decisions are pure (`admission`, `promises`, `granting`); here they get the time and what was measured.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from worldmove import messages as m
from worldmove import rates as names
from worldmove.admission import Demand, Supply, Verdict, judge
from worldmove.config import Settings
from worldmove.errors import GateFullError, InadmissibleError, RejectedError
from worldmove.gate import Gate
from worldmove.granting.meter import Epoch
from worldmove.granting.pauses import Need
from worldmove.manifest import LeafMap, Manifest
from worldmove.paths import Path
from worldmove.probing import LEAST_BYTES, Probe, probe
from worldmove.promises import Promises
from worldmove.rates import Flow, Rates
from worldmove.rings import BATCH_BYTES

MOST_LANES = 16
"""Lanes of inbound moves at once: each is a process."""
STALE_S = 30.0
"""What was measured longer ago refuses nobody: one bad sample is no word for all moves of ten minutes."""
STOP_S = 0.02
"""Beside the block that a world generates, at least: until it has heard that it may stop, and has."""
COLD_SETTLE_S = 0.02
SHORTEST_S = 1e-6
LEAST_DIGEST = 4 << 20
BURST_S = 0.02
LEAST_BURST = 1 << 20
FABRIC_BYTES = 32 << 30
"""Out at once on direct paths: all that lanes ask for, as each bounds itself by its ring."""


class Taken(msgspec.Struct):
    """One move that was taken on.

    `due`: when its bytes have to be here. `landed`: since its world stands. `came`: nothing more comes of it.
    """

    path: str
    source: str
    session: str
    demand: Demand
    supply: Supply
    verdict: Verdict
    began: float
    due: float
    stands: bool = False
    landed: int = 0
    came: bool = False


class Intake:
    """All inbound moves of one node.

    Args:
        settings: of the node.
        lane_wait: tells how many seconds pass until there are so many lanes.

    Attributes:
        gate: grants their bytes.
        fabric: grants those of direct paths, from GPU to GPU: what is under way there lies in the rings of
            lanes, and no line has to be found out. Where the line's rate is given, it is the same gate.
        rates: what was measured here, of moves in either direction.
        rejected: how many were not taken on, by code.
    """

    def __init__(self, settings: Settings, lane_wait: Callable[[int], float] = lambda _lanes: 0.0) -> None:
        rate = settings.gate_rate
        self.rates = Rates()
        self.gate = Gate(
            rate,
            max(int(rate * BURST_S), LEAST_BURST) if rate else LEAST_BURST,
            outstanding_bytes=settings.gate_outstanding,
            senders=settings.gate_senders,
            patience_s=settings.stall_ms / 1000,
            on_epoch=self._on_epoch,
            open_to_all=settings.gate == "off",
        )
        self.fabric = (
            self.gate
            if rate
            else Gate(
                None,
                LEAST_BURST,
                outstanding_bytes=FABRIC_BYTES,
                patience_s=settings.stall_ms / 1000,
                open_to_all=True,
            )
        )
        self._lanes_each, self._lane_wait = settings.lanes, lane_wait
        self._open_to_all, self._live_share = settings.gate == "off", settings.live_share
        self.rejected: Counter[str] = Counter()
        self._most_moves = max(MOST_LANES // settings.lanes, 1)
        self._books = {"staged": Promises(), "local": Promises(), "direct": Promises()}
        self._flows = {path: Flow() for path in self._books}
        self._taken: dict[str, Taken] = {}

    def judge(self, hello: m.Hello, path: str) -> Verdict:
        """Whether a move could be taken on now; promises nothing."""
        return self._judge(hello, path)[0]

    def admit(self, hello: m.Hello, path: str) -> Verdict:
        """Takes a move on, with a promise until nothing of it comes any more (`came`).

        A session that asks anew, from the same node, has left its former move, heard of here or not.

        Raises:
            InadmissibleError: it could not finish in time even alone.
            GateFullError: it could not beside those that were taken on.
        """
        now = time.monotonic()
        for move_id, taken in self._taken.items():
            if (taken.session, taken.source) == (hello.session_id, hello.source):
                self.came(move_id)
        verdict, demand, supply = self._judge(hello, path)
        if not verdict.admissible:
            raise rejection(verdict)
        crowd = sum(one.path == "staged" for one in self._taken.values())
        if path == "staged" and crowd >= self._most_moves:
            raise GateFullError(
                f"{crowd} moves come over lanes already; at most {self._most_moves} can",
                required={"moves": crowd + 1},
                available={"moves": self._most_moves},
                retry_after_ms=1000,
            )
        self._books[path].promise(hello.move_id, verdict, now)
        self._taken[hello.move_id] = Taken(
            path, hello.source, hello.session_id, demand, supply, verdict, now, now + verdict.span_s
        )
        return verdict

    def terms_of(self, move_id: str) -> dict[str, Any]:
        """The terms of a move that was taken on, as `messages.Admitted` carries them."""
        taken = self._taken.get(move_id)
        return admitted(taken.verdict) if taken is not None else {}

    def due_s(self, move_id: str) -> float:
        """In how many seconds all bytes of a move have to be here: the gate's order, as it was promised."""
        taken = self._taken.get(move_id)
        return inf if taken is None else taken.due - time.monotonic()

    def settling_s(self) -> float:
        """How long it takes at most to settle a move that was given up, until its world goes on."""
        return self.rates.tail(names.SETTLE, time.monotonic()) or COLD_SETTLE_S

    async def confirm(self, move_id: str, path: Path, leaf_map: LeafMap) -> None:
        """Before a world is stopped for it: probes a path that was not measured lately, and judges once more.

        Raises:
            InadmissibleError: as measured now, the move could not finish in time.
            WorldMoveError: the path is lost.
        """
        taken, now = self._taken.get(move_id), time.monotonic()
        if taken is None or taken.came:
            return
        if path.name != taken.path:
            self._take_over(move_id, taken, path.name)
        self.rates.note(names.OPEN, max(now - taken.began, 1e-6), now)
        if taken.supply.path is not None or self._shared(taken):
            return
        if taken.demand.state_bytes < LEAST_BYTES and self.gate.rate is None and path.rate is None:
            return  # a probe would be over before it said anything
        if path.rate is not None:
            found = Probe(0, 0.0, path.rate, 0.0)
        else:
            with self.gate.pace.probed() if taken.path == "staged" else contextlib.nullcontext():
                found = await probe(path, leaf_map)
        if found.rate is None or taken.came:  # meanwhile: whoever came promises nothing anew
            return
        now = time.monotonic()
        self.rates.note(names.path_name(taken.path, taken.source), found.rate, now)
        if taken.path == "staged":
            self.rates.note(names.LINE, found.rate, now)
            self.gate.pace.warm(found.rate, found.delay_s)
        supply = msgspec.structs.replace(taken.supply, path=found.rate)
        left_s = max(taken.demand.deadline_s - (now - taken.began), 1e-3)
        demand = msgspec.structs.replace(taken.demand, deadline_s=left_s)
        taken.supply, taken.verdict = supply, judge(demand, supply)
        if not taken.verdict.admissible:
            raise rejection(taken.verdict)
        # What was promised when nobody knew the path may be more than all that it can bring.
        self._books[taken.path].promise(move_id, taken.verdict, now)

    def _shared(self, taken: Taken) -> bool:
        """Whether others come by its path: then a probe would tell what they leave."""
        if taken.path == "staged":
            return self.gate.busy
        return sum(one.path == taken.path for one in self._coming) > 1

    @property
    def _coming(self) -> list[Taken]:
        return [one for one in self._taken.values() if not one.came]

    def _take_over(self, move_id: str, taken: Taken, path: str) -> None:
        """Another path was opened than the move was taken on for: all that is known of it is its line."""
        known = (self.gate.rate, self.rates.rate(names.LINE, time.monotonic()))
        line = min((rate for rate in known if rate), default=None) if path == "staged" else None
        self._books[taken.path].drop(move_id)
        taken.path, taken.supply = path, msgspec.structs.replace(taken.supply, path=None, line=line)
        # While others come by it, it is not probed: what it was promised before could be all of theirs.
        if line is not None and (verdict := judge(taken.demand, taken.supply)).admissible:
            taken.verdict = verdict
        self._books[path].promise(move_id, taken.verdict, taken.began)

    async def turn(self, move_id: str) -> None:
        """Waits until the move may stop its world (`Gate.turn`)."""
        taken = self._taken.get(move_id)
        if taken is not None and not self._open_to_all:
            pause, demand = taken.verdict.pause, taken.demand
            need = Need(
                work_s=pause.work_s,
                apart_s=pause.source_s + pause.rest_s,
                stop_s=demand.block_s + max(self.rates.tail(names.STOP, time.monotonic()) or 0.0, STOP_S),
                horizon_s=demand.horizon_s,
                deadline=taken.began + demand.deadline_s,
            )
            await self.gate.turn(move_id, need)

    def stands(self, move_id: str, stop_s: float | None = None) -> None:
        """The move's world stands: its last bytes come. It was told so long ago that it may stop."""
        taken = self._taken.get(move_id)
        if taken is not None:
            if stop_s is not None:
                self.note_time(names.STOP, max(stop_s - taken.demand.block_s, SHORTEST_S))
            taken.stands, taken.landed = True, 0
            self.gate.stands(move_id, taken.demand.horizon_s)

    def landed(self, move_id: str, nbytes: int) -> None:
        """Bytes of a move have landed."""
        taken = self._taken.get(move_id)
        if taken is None:
            return
        self._books[taken.path].landed(move_id, nbytes)
        self._flows[taken.path].landed(nbytes, time.monotonic())
        if taken.stands:
            taken.landed += nbytes
            pause = taken.verdict.pause
            left = max(1 - taken.landed / max(pause.delta_bytes, 1.0), 0.0)
            self.gate.progress(move_id, pause.work_s * left)

    def came(self, move_id: str) -> None:
        """Nothing of the move comes any more: what it was promised is free, however long it takes to end."""
        taken = self._taken.get(move_id)
        if taken is not None:
            taken.came = True
            self._books[taken.path].drop(move_id)

    def runs(self, move_id: str) -> None:
        """The move's world generates again, here or there, or nothing of it comes any more."""
        self.came(move_id)
        self.gate.turn_over(move_id)

    def over(self, move_id: str) -> None:
        """Everything of the move is gone, its lanes included, however it ended."""
        self.runs(move_id)
        self._taken.pop(move_id, None)

    def note_round(self, path: str, source: str, nbytes: int, seconds: float) -> None:
        """A round over `path` has brought so much, beside those of others; the gate measures its own path."""
        if path != "staged":
            now = time.monotonic()
            together = max(nbytes, self._flows[path].since(now - seconds))
            self.rates.note_bytes(names.path_name(path, source), together, seconds, now)

    def note_digest(self, role: str, manifest: Manifest, nbytes: int, seconds: float) -> None:
        """So many bytes of a session's memory were digested in one go; small ones say nothing."""
        if nbytes >= LEAST_DIGEST:
            self.rates.note_bytes(names.digest_name(role, manifest), nbytes, seconds, time.monotonic())

    def note_time(self, name: str, seconds: float) -> None:
        """What one step took."""
        if seconds > 0:
            self.rates.note(name, seconds, time.monotonic())

    def terms(self, manifest: Manifest, dirty_rate: float | None, egress: float | None) -> m.Terms:
        """What this node tells of itself as the source of a move."""
        digest = self.rates.rate(names.digest_name("source", manifest), time.monotonic())
        return m.Terms(digest_bytes_per_s=digest, dirty_bytes_per_s=dirty_rate, egress_bytes_per_s=egress)

    @property
    def reserved(self) -> float:
        """Bytes per second that are promised."""
        now = time.monotonic()
        return sum(book.reserved(now) for book in self._books.values())

    def shown(self) -> dict[str, Any]:
        """What `views.NodeView` shows of it."""
        now = time.monotonic()
        return {
            "gate": self.gate.view(),
            "measured": self.rates.found(now),
            "reserved_bytes_per_s": self.reserved,
            "rejected": dict(self.rejected),
        }

    def _judge(self, hello: m.Hello, path: str) -> tuple[Verdict, Demand, Supply]:
        now, demand = time.monotonic(), demand_of(hello)
        supply = self._supply(hello, path, now)
        book = self._books[path]
        verdict = book.judge(demand, supply, now)
        if self._open_to_all:
            return msgspec.structs.replace(verdict, admissible=True, provisional=True), demand, supply
        if verdict.code == "inadmissible":
            recent = self._supply(hello, path, now, STALE_S)
            hoped = book.judge(demand, recent, now)
            if hoped.admissible:
                return msgspec.structs.replace(hoped, provisional=True), demand, recent
        return verdict, demand, supply

    def _open_s(self, path: str, usual: float) -> float:
        """Until a path is open. Where lanes have to be started first, the source starts as many before."""
        if path != "staged":
            return usual
        crowd = sum(one.path == "staged" for one in self._taken.values()) + 1
        return max(usual, 2 * self._lane_wait(crowd * self._lanes_each))

    def _supply(self, hello: m.Hello, path: str, now: float, within_s: float = inf) -> Supply:
        measured, terms = self.rates, hello.terms or m.Terms()
        rate = measured.rate(names.path_name(path, hello.source), now, within_s)
        line = measured.rate(names.LINE, now, within_s) if path == "staged" else rate
        if self.gate.rate is not None and path == "staged":
            line = self.gate.rate if line is None else min(line, self.gate.rate)
        gated = line if path == "staged" else None
        return Supply(
            path=rate,
            line=line,
            egress=terms.egress_bytes_per_s if path == "staged" else None,
            # The source reads its state in every move: when it last did, the path was measured, too.
            source_digest=None if rate is None and within_s < inf else terms.digest_bytes_per_s,
            live_share=self._live_share,
            destination_digest=measured.rate(names.digest_name("destination", hello.manifest), now, within_s),
            open_s=self._open_s(path, measured.usual(names.OPEN, now, within_s) or 0.0),
            commit_s=measured.tail(names.COMMIT, now, within_s) or 0.0,
            resume_s=measured.tail(names.RESUME, now, within_s) or 0.0,
            blocked_s=self._blocked_s(gated) if gated else 0.0,
            grain_s=self.gate.batch_bytes(BATCH_BYTES, self._lanes_each) / gated if gated else 0.0,
        )

    def _blocked_s(self, line: float) -> float:
        demands = [one.demand for one in self._coming if one.path == "staged"]
        copying = sum(demand.state_bytes for demand in demands if demand.live)
        standing = max((demand.state_bytes for demand in demands if not demand.live), default=0)
        return self.gate.blocked_s(line, copying=copying, standing=standing)

    def _on_epoch(self, epoch: Epoch, now: float) -> None:
        self.rates.note(names.LINE, epoch.goodput, now)
        if epoch.alone is not None:
            self.rates.note(names.path_name("staged", epoch.alone), epoch.goodput, now)


def demand_of(hello: m.Hello) -> Demand:
    """What a move asks for."""
    manifest, terms = hello.manifest, hello.terms or m.Terms()
    return Demand(
        state_bytes=manifest.nbytes,
        live=hello.live,
        block_s=manifest.block_ms / 1000,
        horizon_s=hello.horizon_ms / 1000,
        deadline_s=hello.deadline_ms / 1000,
        dirty_rate=terms.dirty_bytes_per_s,
    )


def rejection(verdict: Verdict) -> RejectedError:
    """The error of a verdict that takes nothing on, with every term."""
    details: dict[str, Any] = {
        "condition": verdict.condition,
        "required": verdict.required,
        "available": verdict.available,
        "unmeasured": list(verdict.unmeasured),
    }
    if verdict.retry_after_s is not None:
        details["retry_after_ms"] = verdict.retry_after_s * 1000
    kind = GateFullError if verdict.code == "gate-full" else InadmissibleError
    return kind(verdict.reason or "the move can't be taken on", **details)


def admitted(verdict: Verdict) -> dict[str, Any]:
    """A verdict's terms, as `messages.Admitted` carries them."""
    return {
        "required": verdict.required,
        "available": verdict.available,
        "unmeasured": verdict.unmeasured,
        "provisional": verdict.provisional,
    }
