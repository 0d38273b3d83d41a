"""The words of the move's machine: states, what happens (events), and what to do about it (actions).

Messages of the peer are events too (`worldmove.messages`). Everything here is a plain frozen value, so
that a whole move can be written down as a transcript and replayed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from worldmove.messages import (
    Admitted,
    Adopted,
    Begin,
    Committed,
    Hello,
    Message,
    Rejected,
    Sealed,
    TablePart,
    Verified,
)


class State(StrEnum):
    """The contract's states, and two waits for the ledger's word: `settling` and `reclaiming`."""

    REQUESTED = "requested"
    ADMITTED = "admitted"
    PREPARED = "prepared"
    COPYING = "copying"
    PAUSING = "pausing"
    FINISHING = "finishing"
    VERIFYING = "verifying"
    COMMITTED = "committed"
    ADOPTED = "adopted"
    RELEASED = "released"
    REJECTED = "rejected"
    ABORTED = "aborted"
    SETTLING = "settling"
    RECLAIMING = "reclaiming"


ENDED = frozenset({State.RELEASED, State.REJECTED, State.ABORTED})
Outcome = Literal["aborted", "committed", "adopted", "reclaimed"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Base of everything that happens on this node."""


class Start(Event, frozen=True, kw_only=True):
    """Source: an operator asked for the move."""

    hello: Hello


class RecordBegun(Event, frozen=True, kw_only=True):
    """Source: the session's record says `moving`, with this move."""


class PathOffered(Event, frozen=True, kw_only=True):
    """Source: lanes listen, or the descriptors' door is open."""

    begin: Begin


class PreparedHere(Event, frozen=True, kw_only=True):
    """Source: the driver has noted that everything is prepared; the world has generated `block`."""

    block: int = 0


class LandedHere(Event, frozen=True, kw_only=True):
    """Source: the driver has looked, as a live round had landed: the world has generated `block` by now."""

    block: int


class TableDone(Event, frozen=True, kw_only=True):
    """Source: every part of the round's table was sent; `block` was generated when its reading began."""

    number: int
    block: int = 0


class WorldPaused(Event, frozen=True, kw_only=True):
    """Source: every rank stopped after `block`."""

    block: int


class WorldSealed(Event, frozen=True, kw_only=True):
    """Source: the paused world's root is known."""

    sealed: Sealed


class WorldReleased(Event, frozen=True, kw_only=True):
    """Source: the worker knows where its session went, and the memory is gone."""


class AdmitOk(Event, frozen=True, kw_only=True):
    """Destination: a standby is bound and memory is reserved."""

    admitted: Admitted


class AdmitRefused(Event, frozen=True, kw_only=True):
    """Destination: the move cannot be taken on."""

    rejected: Rejected


class PathReady(Event, frozen=True, kw_only=True):
    """Destination: lanes are connected, or descriptors are mapped; see `messages.Prepared`."""

    path: str | None = None
    gbps: float = 0.0
    reason: str = ""


class RoundComplete(Event, frozen=True, kw_only=True):
    """Destination: what the round asked for has landed and was read back; see `messages.Landed`."""

    number: int
    leaves: int
    bytes: int
    ms: float
    copied_bytes: int = 0
    wire_ms: float = 0.0


class DamageFound(Event, frozen=True, kw_only=True):
    """Destination: `leaves` leaves in memory differ from the source's table."""

    leaves: int


class Repaired(Event, frozen=True, kw_only=True):
    """Destination: the damaged leaves have been sent and read back again."""


class MemoryVerified(Event, frozen=True, kw_only=True):
    """Destination: leaf tables are equal, and so are the roots."""

    verified: Verified


class RecordCommitted(Event, frozen=True, kw_only=True):
    """Destination: the record names this node as owner."""

    committed: Committed


class RecordAdopted(Event, frozen=True, kw_only=True):
    """Destination: the record says `adopted`, and the standby was told to generate."""

    adopted: Adopted


class RecordSettled(Event, frozen=True, kw_only=True):
    """The record has been read after this side wrote, or tried to write, `aborted`: this is what stands."""

    outcome: Outcome


class PeerLost(Event, frozen=True, kw_only=True):
    """The control channel ended or fell silent."""

    message: str


class Failed(Event, frozen=True, kw_only=True):
    """Something on this side makes it impossible to go on (or an operator cancelled)."""

    code: str
    message: str


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Base of everything that a driver performs."""


class Send(Action, frozen=True, kw_only=True):
    """Send a message to the peer."""

    message: Message


class BeginRecord(Action, frozen=True, kw_only=True):
    """Swap the record to `moving`."""


class OfferPath(Action, frozen=True, kw_only=True):
    """Source: lease lanes, or open the door for descriptors; `lanes`: staged ones, if only in case."""

    path: str
    lanes: int


class NotePrepared(Action, frozen=True, kw_only=True):
    """Source: take the time, then go on."""


class NoteLanded(Action, frozen=True, kw_only=True):
    """Source: look how far the world has come since the round's table, then go on."""


class ReadTable(Action, frozen=True, kw_only=True):
    """Source: digest the session's memory and send the table in parts as they are done."""

    number: int
    final: bool


class PauseWorld(Action, frozen=True, kw_only=True):
    """Source: stop every rank at one boundary."""


class SealWorld(Action, frozen=True, kw_only=True):
    """Source: compute the root of the paused world from the table that was sent."""


class ResumeWorld(Action, frozen=True, kw_only=True):
    """Source: the record allows it: let the ranks go on."""


class ReleaseWorld(Action, frozen=True, kw_only=True):
    """Source: the record says that the destination owns the session: tell the worker, free the memory."""


class Admit(Action, frozen=True, kw_only=True):
    """Destination: look for a standby and everything else that admission asks for."""

    hello: Hello


class OpenPath(Action, frozen=True, kw_only=True):
    """Destination: read the record, connect the lanes or fetch the descriptors."""

    begin: Begin


class Expect(Action, frozen=True, kw_only=True):
    """Destination: have what the last round will bring, as far as that is foreseen, begin at the stop."""


class StartRound(Action, frozen=True, kw_only=True):
    """Destination: begin a round; ask at once for the leaves that are not known here."""

    number: int
    final: bool


class PlanPart(Action, frozen=True, kw_only=True):
    """Destination: compare a part of the source's table and ask for what differs."""

    part: TablePart


class CloseRound(Action, frozen=True, kw_only=True):
    """Destination: nothing more will be asked for in this round; say when all of it is in memory."""

    number: int


class Verify(Action, frozen=True, kw_only=True):
    """Destination: compare the tables of what lies in memory, and the roots."""

    sealed: Sealed


class Repair(Action, frozen=True, kw_only=True):
    """Destination: ask again for the leaves that differ."""


class CommitRecord(Action, frozen=True, kw_only=True):
    """Destination: swap the record to `committed`, owner here, next epoch."""

    block: int
    root: str


class AdoptRecord(Action, frozen=True, kw_only=True):
    """Destination: swap the record to `adopted`, unless it says so, then hand the world to the standby."""

    block: int


class CloseRecord(Action, frozen=True, kw_only=True):
    """Destination: swap the record from `adopted` to `owned`."""


class AbortPath(Action, frozen=True, kw_only=True):
    """End the lanes and wait until nothing writes any more; once, however often it is asked for."""


class SettleRecord(Action, frozen=True, kw_only=True):
    """Write `aborted` if the record says `moving`; report what stands. Asks until the ledger answers."""


class AwaitAdoption(Action, frozen=True, kw_only=True):
    """Source: give the destination its time to adopt, then try to reclaim; report what stands."""


class AwaitReclaim(Action, frozen=True, kw_only=True):
    """Destination: it cannot adopt; wait for the source to reclaim, else adopt without a worker."""


class WipeMemory(Action, frozen=True, kw_only=True):
    """Destination: the record allows it: overwrite what arrived and free the standby."""


class Finish(Action, frozen=True, kw_only=True):
    """Write the receipt, close the channel, forget the move. `code` is `None` after a success."""

    code: str | None = None
    message: str | None = None
