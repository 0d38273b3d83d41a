"""Making slots: new ones, and those that a former incarnation of the node left with the keeper."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worldmove.hosting.memory import Holding
from worldmove.hosting.pages import Pages
from worldmove.hosting.ranks import Change
from worldmove.hosting.slots import Slot, SlotRecord
from worldmove.hosting.spare import Spare
from worldmove.ipc import close_all
from worldmove.manifest import LeafMap, Manifest
from worldmove.memory.limits import check_descriptors
from worldmove.page.control import ControlPage, create_page
from worldmove.page.messages import Adopted


class Owner(NamedTuple):
    """What a slot calls: with news of its ranks, and with descriptors that nobody needs any more."""

    on_change: Callable[[Slot, Change], None]
    discard: Callable[[Sequence[int]], None]


class Name(NamedTuple):
    """What a new slot is called. `session_id` is `None` for a standby, `seed` `None` for a random one."""

    id: str
    session_id: str | None
    seed: int | None = None


def make_slot(
    name: Name,
    holding: Holding,
    fingerprint: Mapping[str, str],
    owner: Owner,
    *,
    incarnation: int,
    epoch: int,
) -> Slot:
    """A new slot around memory that exists; the holding is the slot's, unless this raises.

    Raises:
        NoMemoryError: there are no descriptors left for one more.
    """
    check_descriptors()
    return Slot(
        key=secrets.token_hex(8),
        slot_id=name.id,
        session_id=name.session_id,
        seed=secrets.randbits(64) if name.seed is None else name.seed,
        fingerprint=fingerprint,
        holding=holding,
        pages=_pages(holding.manifest, incarnation, epoch, name.session_id),
        secrets=tuple(secrets.token_urlsafe(32) for _ in holding.manifest.ranks),
        on_change=owner.on_change,
        discard=owner.discard,
    )


def restore_slot(record: SlotRecord, fds: Sequence[int], incarnation: int, owner: Owner) -> Slot:
    """The slot that a record describes, with a new control page before the former ones. Owns `fds`.

    Raises:
        FramingError: the descriptors are not what the record says; they are closed.
    """
    former, extents = fds[: record.pages], fds[record.pages :]
    extents, spares = extents[: len(record.extents)], extents[len(record.extents) :]
    try:
        with_page = ControlPage(former[0])
        # The record follows the page, which is written at once: an adoption stands there first.
        session_id, epoch = with_page.session_id or record.session_id, with_page.epoch
        with_page.close()
    except BaseException:
        close_all(fds)
        raise
    try:
        pages = _pages(record.manifest, incarnation, epoch, session_id, former)
    except BaseException:
        close_all([*extents, *spares])
        raise
    try:
        spare = Spare.restore(record.spare, spares) if record.spare is not None else None
    except BaseException:
        pages.close()
        close_all(extents)
        raise
    for rank in range(pages.page.ranks):
        pages.look_back(rank)
    adopted = None
    if session_id is not None:
        adopted = Adopted(session_id, epoch, pages.page.block(0), record.manifest.endpoint)
    slot = Slot(
        key=record.key,
        slot_id=session_id or record.id,
        session_id=session_id,
        seed=record.seed,
        fingerprint=record.fingerprint,
        holding=Holding(
            record.manifest,
            record.extents,
            record.places,
            tuple(extents),
            record.counted,
            LeafMap(record.manifest.regions),
        ),
        pages=pages,
        secrets=record.secrets,
        revisions=record.revisions,
        adopted=adopted,
        on_change=owner.on_change,
        discard=owner.discard,
    )
    slot.bound, slot.spare = record.bound, spare
    return slot


def _pages(
    manifest: Manifest, incarnation: int, epoch: int, session_id: str | None, former: Sequence[int] = ()
) -> Pages:
    """A new page before former ones; owns all their descriptors, also if it fails."""
    ranks = len(manifest.ranks)
    fds = [*former]
    try:
        fds.insert(0, create_page(ranks, manifest.host_state_bytes, incarnation=incarnation, epoch=epoch))
    except BaseException:
        close_all(fds)
        raise
    pages = Pages(fds[0], fds[1:])
    try:
        pages.page.session_id = session_id
        pages.page.revision = manifest.revision
    except BaseException:
        pages.close()
        raise
    return pages
