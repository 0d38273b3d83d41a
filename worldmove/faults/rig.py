"""Makes armed faults happen to the moves of one node: the other end of `worldmove.driver.Faults`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.descriptors import fetch
from worldmove.driver import WORK, Driver, PeerChannel, Work
from worldmove.errors import WorldMoveError
from worldmove.faults.armory import Armory
from worldmove.faults.channel import FaultyChannel, suits
from worldmove.faults.ledger import FaultyLedger
from worldmove.faults.points import Fault, Kind
from worldmove.hosting.slots import Slot
from worldmove.ipc import close_all
from worldmove.memory.arena import no_memory
from worldmove.protocol import State
from worldmove.transport.pool import LaneRegion

STEAL_MS = 2000
ENDS = ("cut", "mute")
"""Faults that end a control connection."""


class Rig:
    """What is armed, done to the moves of one node.

    Args:
        armory: what is armed.
        ledger: the node's, made to misbehave.
        keeper: pid of the node's keeper, 0 if there is none.
    """

    def __init__(self, armory: Armory, ledger: FaultyLedger, keeper: Callable[[], int]) -> None:
        self._armory = armory
        self._ledger = ledger
        self._keeper = keeper
        self._due: dict[Driver, list[Fault]] = {}
        self._channels: dict[Driver, FaultyChannel] = {}

    def channel(self, move: Driver, channel: PeerChannel) -> PeerChannel:
        """The control connection of a move that begins."""
        faulty = FaultyChannel(
            channel,
            lambda kind: self._take(move, lambda fault: suits(fault, kind)),
            lambda begin: self._steal(move, begin),
            move.services.settings.peer_timeout_ms / 1000,
        )
        self._channels[move] = faulty
        if move not in self._due:
            self.entered(move)
        for fault in [one for one in self._due[move] if one.what in ENDS]:
            self._due[move].remove(fault)
            self._end(move, fault)
        return faulty

    def _forget(self, move: Driver) -> None:
        self._due.pop(move, None)
        self._channels.pop(move, None)

    def entered(self, move: Driver) -> None:
        """A move has come into a phase."""
        if move not in self._due:
            move.done.add_done_callback(lambda _done: self._forget(move))
        # What could not happen in the phase before does not happen in this one instead.
        self._due[move] = []
        self._ledger.spare(move.session_id)
        for fault in self._armory.take(move.role, move.machine.state):
            self._befall(move, fault)

    def awaits(self, move: Driver, state: State) -> bool:
        """Whether a fault waits for the move in this phase."""
        return self._armory.awaits(move.role, state)

    def work(self, move: Driver, action: p.Action, work: Work) -> Work:
        """What a move does next."""
        if move not in self._due:  # a destination is asked before its connection is made ready
            self.entered(move)
        wanted = ("delay", "starve") if isinstance(action, WORK) else ("delay",)
        fault = self._take(move, lambda one: one.what in wanted)
        return work if fault is None else self._hindered(fault, work)

    async def _hindered(self, fault: Fault, work: Work) -> None:
        if fault.what == "starve":
            work.close()
            raise no_memory(1 << 30, 0, "fault")
        try:
            await asyncio.sleep(fault.ms / 1000)
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    def _take(self, move: Driver, suits: Callable[[Fault], bool]) -> Fault | None:
        due = self._due.get(move, [])
        fault = next((fault for fault in due if suits(fault)), None)
        if fault is not None:
            due.remove(fault)
            self._armory.note(fault, move.move_id)
        return fault

    def _befall(self, move: Driver, fault: Fault) -> None:
        if fault.what in ENDS and move in self._channels:
            self._end(move, fault)
            return
        if fault.kind in (Kind.WORK, Kind.CHANNEL):
            self._due[move].append(fault)
            return
        self._armory.note(fault, move.move_id)
        if fault.what == "ledger-down":
            self._ledger.down(fault.ms)
        elif fault.kind is Kind.LEDGER:
            self._ledger.befall(move.session_id, fault)
        elif fault.kind is Kind.LANE:
            for pool in (move.services.lanes, *move.services.direct.values()):
                pool.arm(fault.what)
        else:
            self._signal(move, fault.what)

    def _end(self, move: Driver, fault: Fault) -> None:
        self._armory.note(fault, move.move_id)
        channel = self._channels[move]
        channel.cut() if fault.what == "cut" else channel.mute()

    def _signal(self, move: Driver, what: str) -> None:
        services = move.services
        target, _, deed = what.rpartition("-")
        pids = {
            "": lambda: [os.getpid()],
            "keeper": lambda: [pid for pid in (self._keeper(),) if pid],
            "executor": lambda: list(services.executors.pids),
            "lane": lambda: [
                pid
                for pool in (services.lanes, *services.direct.values())
                for pid, _, leased in pool.lanes
                if leased == move.move_id
            ],
            "worker": lambda: _workers(move.slot),
        }[target]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if deed == "kill" else signal.SIGSTOP)

    async def _steal(self, move: Driver, begin: m.Begin) -> None:
        """Presents the one-time token of an offer before the peer can."""
        with contextlib.suppress(WorldMoveError):
            if begin.socket is not None and begin.token is not None:
                close_all(await fetch(begin.socket, begin.token, begin.descriptors, STEAL_MS))
            for offer in begin.lanes[:1]:
                await _call_lane(move, offer)


async def _call_lane(move: Driver, offer: m.LaneOffer) -> None:
    slot = move.slot
    if slot is None:
        return
    memory = slot.holding
    extents = [(fd, extent.nbytes) for fd, extent in zip(memory.fds, memory.extents, strict=True)]
    places = zip(memory.places, memory.manifest.regions, strict=True)
    regions = [LaneRegion(place.extent, place.offset, region.nbytes) for place, region in places]
    thief = await move.services.lanes.lease(f"{move.move_id}", extents, regions, writable=False)
    try:
        await thief.connect(offer.host, offer.port, offer.token, STEAL_MS)
    finally:
        thief.abort()
        await thief.gone()


def _workers(slot: Slot | None) -> list[int]:
    if slot is None:
        return []
    seats = [slot.ranks.seat(rank) for rank in range(len(slot.manifest.ranks))]
    return [seat.pid for seat in seats if seat is not None and seat.pid]
