"""Making slots: new ones, and those that a former incarnation of the node left with the keeper."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worldmove.errors import FramingError
from worldmove.hosting.folio import Folio
from worldmove.hosting.memory import Holding
from worldmove.hosting.pages import Leaf, Pages
from worldmove.hosting.ranks import Change
from worldmove.hosting.slots import Slot, SlotRecord
from worldmove.hosting.spare import Spare
from worldmove.ipc import close_all
from worldmove.manifest import LeafMap, Manifest
from worldmove.page.control import ControlPage, create_page
from worldmove.page.messages import Adopted


class Owner(NamedTuple):
    """What a slot calls: with news of its ranks, and with descriptors that nobody needs any more.

    `folio` is where the pages of sessions lie that have no worker.
    """

    on_change: Callable[[Slot, Change], None]
    discard: Callable[[Sequence[int]], None]
    folio: Folio


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
        TransportError: there is no descriptor, or no memory, for its page.
    """
    made = _Made(holding.manifest, incarnation, epoch, name.session_id)
    return Slot(
        key=secrets.token_hex(8),
        slot_id=name.id,
        session_id=name.session_id,
        seed=secrets.randbits(64) if name.seed is None else name.seed,
        fingerprint=fingerprint,
        holding=holding,
        pages=_pages(made, owner.folio if name.session_id is not None else None),
        secrets=tuple(secrets.token_urlsafe(32) for _ in holding.manifest.ranks),
        on_change=owner.on_change,
        discard=owner.discard,
    )


def restore_slot(
    record: SlotRecord,
    fds: Sequence[int],
    incarnation: int,
    owner: Owner,
    former_folios: Mapping[str, int] | None = None,
) -> Slot:
    """The slot that a record describes, with a new control page before the former ones. Owns `fds`.

    A session that has no living worker gets a page in the folio, and no former one is kept: nobody can write
    into it any more but the former incarnation, which is to change nothing.

    Args:
        record: as the keeper has it.
        fds: all of its descriptors.
        incarnation: of this node.
        owner: of the slot.
        former_folios: descriptors by the folio's key; they stay the caller's.

    Raises:
        FramingError: the descriptors are not what the record says; they are closed.
    """
    own, extents = fds[: record.pages], fds[record.pages :]
    extents, spares = extents[: len(record.extents)], extents[len(record.extents) :]
    try:
        found = _reopen(record, own, incarnation, owner.folio, former_folios or {})
    except BaseException:
        close_all([*extents, *spares])
        raise
    try:
        spare = Spare.restore(record.spare, spares) if record.spare is not None else None
    except BaseException:
        found.pages.close()
        close_all(extents)
        raise
    slot = _slot_of(record, found, extents, owner)
    slot.bound, slot.spare = record.bound, spare
    return slot


class _Found(NamedTuple):
    """What the former pages say, and the pages from now on."""

    session_id: str | None
    epoch: int
    pages: Pages


def _reopen(
    record: SlotRecord, fds: Sequence[int], incarnation: int, folio: Folio, former_folios: Mapping[str, int]
) -> _Found:
    """A new page before the former ones, saying what the latest of them says; owns their descriptors `fds`.

    The record follows the page, which is written at once: an adoption stands there first.
    """
    try:
        latest = _latest(record, fds, former_folios)
    except BaseException:
        close_all(fds)
        raise
    try:
        session_id, epoch = latest.session_id or record.session_id, latest.epoch
        made = _Made(record.manifest, incarnation, epoch, session_id)
        idle = session_id is not None and not _anybody(fds)
        lying = latest if record.leaf is not None else None
        pages = _pages(made, folio if idle else None, fds, lying, recovered=True)
    finally:
        latest.close()
    return _Found(session_id, epoch, pages)


def _slot_of(record: SlotRecord, found: _Found, extents: Sequence[int], owner: Owner) -> Slot:
    """The slot of a record around its extents and its reopened pages."""
    manifest, adopted = record.manifest, None
    if found.session_id is not None:
        adopted = Adopted(found.session_id, found.epoch, found.pages.page.block(0), manifest.endpoint)
    leaves = LeafMap(manifest.regions)
    return Slot(
        key=record.key,
        slot_id=found.session_id or record.id,
        session_id=found.session_id,
        seed=record.seed,
        fingerprint=record.fingerprint,
        holding=Holding(manifest, record.extents, record.places, tuple(extents), record.counted, leaves),
        pages=found.pages,
        secrets=record.secrets,
        revisions=record.revisions,
        adopted=adopted,
        on_change=owner.on_change,
        discard=owner.discard,
    )


class _Made(NamedTuple):
    """What a new page says."""

    manifest: Manifest
    incarnation: int
    epoch: int
    session_id: str | None


def _latest(record: SlotRecord, own: Sequence[int], folios: Mapping[str, int]) -> ControlPage:
    """The page that was in force when the record was written."""
    if record.leaf is None:
        return ControlPage(own[0])
    fd = folios.get(record.leaf.folio)
    if fd is None:
        raise FramingError(f"nobody holds folio {record.leaf.folio} any more")
    return ControlPage(fd, *record.leaf.place)


def _anybody(fds: Sequence[int]) -> bool:
    """Whether a living process has a rank, by any of a session's pages."""
    for fd in fds:
        page = ControlPage(fd)
        try:
            if any(page.occupied(rank) for rank in range(page.ranks)):
                return True
        finally:
            page.close()
    return False


def _pages(
    made: _Made,
    folio: Folio | None,
    former: Sequence[int] = (),
    lying: ControlPage | None = None,
    *,
    recovered: bool = False,
) -> Pages:
    """A new page before former ones; owns all their descriptors, also if it fails.

    Args:
        made: what it says.
        folio: it is to lie there if there is room, and the former ones are let go of.
        former: descriptors of earlier ones.
        lying: the former one, where it lies in a former folio.
        recovered: by a node that has started again.
    """
    manifest = made.manifest
    ranks, state_bytes = len(manifest.ranks), manifest.host_state_bytes
    says = {"incarnation": made.incarnation, "epoch": made.epoch}
    fds = [*former]
    try:
        place = folio.add(ranks, state_bytes, **says) if folio is not None else None
        leaf = Leaf(folio, place) if folio is not None and place is not None else None
        if leaf is None:
            fds.insert(0, create_page(ranks, state_bytes, **says))
    except BaseException:
        close_all(fds)
        raise
    pages = Pages(fds, leaf, recovered=recovered)
    try:
        pages.page.session_id = made.session_id
        pages.page.revision = manifest.revision
        for rank in range(ranks):
            if lying is not None:
                pages.page.copy_rank(lying, rank)
            pages.look_back(rank)
    except BaseException:
        pages.close()
        raise
    if folio is not None:
        pages.forget_former()
    return pages
