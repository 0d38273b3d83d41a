"""Workers that come back to a node without their slot: is their session this node's, and if not, whose?

The ledger says so, nobody else could.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from worldmove.driver import Services
from worldmove.errors import LedgerError, NotFoundError
from worldmove.hosting.handback import Warrant
from worldmove.hosting.slots import Slot
from worldmove.ledger.records import Claim, SessionRecord
from worldmove.page.messages import Ended, Handback, Moved

COMMIT_AND_RECLAIM = 2
"""Epochs by which a reclaimed record is ahead of a page that its node had no time to write."""


def warrant(services: Services, settle: Callable[[Slot], None]) -> Warrant:
    """What a host needs to take sessions back; `settle` gets each, fenced, as if the keeper had held it."""

    async def ask(session_id: str, epoch: int, held: int | None) -> Moved | Ended | None:
        try:
            record = await services.ledger.get(session_id)
        except LedgerError:
            return None
        return None if record is None else whereabouts(record, epoch, held, services.claim)

    return Warrant(partial(check_returning, services), settle, ask)


def whereabouts(record: SessionRecord, epoch: int, held: int | None, mine: Claim) -> Moved | Ended | None:
    """What a record says to a rank whose slot is not on this node; `None`: not that its world is over here.

    Args:
        record: of its session.
        epoch: of the rank's world. A record that is not later than that can't tell where it went.
        held: epoch of the slot of this session that is here, if any: the world has gone and come back.
        mine: this node.
    """
    if record.phase == "ended" and record.epoch >= epoch:
        return Ended("the session has ended")
    here = record.owner == mine.name and held != record.epoch
    # What was committed and is not adopted yet, its source may take back, with this rank's memory.
    open_yet = record.phase == "committed" and record.move is not None and record.move.source == mine.name
    if record.epoch <= epoch or here or open_yet:
        return None
    return Moved(record.owner, record.endpoint)


async def check_returning(services: Services, first: Handback, epoch: int) -> None:
    """Checks that the ledger's record allows this node to take the memory back.

    Args:
        services: of the node.
        first: whose memory it is said to be, and on which devices.
        epoch: that stands in the worker's control page.

    Raises:
        ManifestError: this node has not the devices.
        NotFoundError: the record is another node's, or there is none; a world of a newer epoch is elsewhere;
            or it was committed to this node and never adopted: the source takes it back.
        LedgerError: the ledger does not answer.
    """
    session_id = first.session_id
    for region in first.manifest.regions:
        services.executors.of(region.device)
    record = await services.ledger.get(session_id)
    if record is None or record.phase == "ended":
        raise NotFoundError(f"session {session_id!r} is not in the ledger", session_id=session_id)
    least = least_epoch(record, services.claim)
    if least is None:
        raise NotFoundError(f"session {session_id!r} is {record.owner}'s", session_id=session_id)
    if epoch < least:
        raise NotFoundError(f"session {session_id!r} has gone on since epoch {epoch}", session_id=session_id)


def least_epoch(record: SessionRecord, mine: Claim) -> int | None:
    """The epoch of the world that lay on this node when the record was written; `None`: none did.

    A page of a later one is taken too: the ledger was set back, which recovery leaves to an operator.
    """
    if record.phase == "committed":
        leaving = record.move is not None and record.move.source == mine.name
        return record.epoch - 1 if leaving else None
    if record.owner != mine.name:
        return None
    if record.phase == "owned" and record.outcome == "reclaimed":
        return record.epoch - COMMIT_AND_RECLAIM
    return record.epoch
