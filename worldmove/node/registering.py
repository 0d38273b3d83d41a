"""Sessions and standbys of one node: registered, shown, digested, attached, ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from worldmove.digest import LeafTable
from worldmove.driver import Services
from worldmove.errors import (
    ConflictError,
    DeadlineError,
    ManifestError,
    NotFoundError,
    NotOwnerError,
    ValidationError,
)
from worldmove.hosting.host import Host
from worldmove.hosting.ranks import Pause
from worldmove.hosting.rest import rest_boundary
from worldmove.hosting.slots import Slot
from worldmove.ledger import records
from worldmove.ledger.records import NodeInfo, SessionRecord
from worldmove.manifest import MAX_NAME, validate
from worldmove.node.recovery import Recovery
from worldmove.node.resolving import Decision, Resolver
from worldmove.node.snapshots import Snapshots
from worldmove.page.messages import Ended
from worldmove.reading import Reader
from worldmove.sessions import Session, SessionBook
from worldmove.views import (
    BoundaryView,
    DigestView,
    RegionDigest,
    Registration,
    SessionEvent,
    SessionPage,
    SessionSpec,
    SessionView,
    Ticket,
)

REST_LEASE_S = 10.0
REST_LEASE_BLOCKS = 20
"""A worker on REST that has been silent for so many of its blocks counts as gone."""


class Registrar:
    """Everything about sessions that is no move."""

    def __init__(
        self,
        services: Services,
        host: Host,
        book: SessionBook,
        recovery: Recovery,
        snapshots: Snapshots,
    ) -> None:
        self._snapshots = snapshots
        self._services = services
        self._host = host
        self._book = book
        self._recovery = recovery
        self._resolver = Resolver(services, host, book, recovery)

    async def register(self, spec: SessionSpec) -> Registration:
        """Registers a running world: memory first, then the ledger; all or nothing.

        Raises:
            ManifestError, NoMemoryError: see `Host.open_session`.
            SessionExistsError: the id is in use, here or elsewhere.
            ValidationError: the id is not acceptable.
        """
        session_id = spec.id if spec.id is not None else f"session-{secrets.token_hex(8)}"
        _check_id(session_id)
        validate(spec.manifest)
        claim = self._services.claim
        proposed = SessionRecord(
            session_id=session_id,
            epoch=1,
            owner=claim.name,
            incarnation=claim.incarnation,
            model=spec.manifest.model,
            revision=spec.manifest.revision,
            endpoint=spec.manifest.endpoint,
            bytes=spec.manifest.nbytes,
            ranks=len(spec.manifest.ranks),
            block_ms=spec.manifest.block_ms,
            horizon_ms=spec.manifest.horizon_ms,
        )
        # Epoch 0 until the ledger has it: a page of a later epoch without a record means a lost ledger.
        slot, tickets = await self._host.open_session(spec, session_id, 0)
        try:
            await self._snapshots.reserve(slot)
            record = await self._services.ledger.create(proposed)
        except BaseException:
            self._host.close_slot(slot, Ended("the registration failed"))
            raise
        slot.ranks.page.epoch = record.epoch
        self._book.add(slot, record)
        return self._registration(session_id, record.epoch, tickets)

    async def open_standby(self, spec: SessionSpec) -> Registration:
        """Reserves memory for a worker that waits; raises as `register`, and refuses `cuda-ipc` memory."""
        validate(spec.manifest)
        for number, region in enumerate(spec.manifest.regions):
            if region.source.kind == "cuda-ipc":
                # What lands there would be lost with its worker, before and after the commit.
                field = f"regions[{number}].source.kind"
                raise ManifestError(f"{field} is 'cuda-ipc'; a standby's may be 'arena'", field=field)
        slot, tickets = await self._host.open_standby(spec)
        return self._registration(slot.id, 0, tickets)

    def drop_standby(self, standby_id: str) -> None:
        """Forgets a standby that waits.

        Raises:
            NotFoundError: there is none of this id.
            ConflictError: it is promised to a move.
        """
        slot = self._host.standby(standby_id)
        if slot.bound is not None:
            raise ConflictError(f"standby {standby_id!r} is promised to move {slot.bound}")
        self._host.close_slot(slot, Ended("dropped by an operator"))

    async def attach(self, session_id: str, fingerprint: Mapping[str, str]) -> Registration:
        """Tickets for another worker of an unattended session; raises as `Host.attach`."""
        await self._snapshots.mend(await self._held(session_id))
        _slot, tickets = self._host.attach(session_id, fingerprint)
        session = await self._held(session_id)
        return self._registration(session_id, session.record.epoch, tickets)

    async def boundary(
        self, session_id: str, rank: int, block: int, host_state: bytes, wait_ms: float
    ) -> BoundaryView:
        """A boundary of a worker that cannot map the control page; answers within `wait_ms`.

        A session that has moved on answers `moved` as long as the ledger knows it, one that waits for its
        record `wait`.

        Raises:
            NotFoundError: no such session or rank.
            ConflictError, ManifestError: see `rest_boundary`.
        """
        await self._recovery.gone(session_id, wait_ms / 1000)
        session = self._book.get(session_id)
        if session is None and self._recovery.fenced(session_id) is not None:
            return BoundaryView(action="wait")
        if session is None:
            return await self._over(session_id)
        lease_s = max(REST_LEASE_S, REST_LEASE_BLOCKS * session.slot.manifest.block_ms / 1000)
        return await rest_boundary(
            session.slot.ranks, rank, block, host_state, wait_s=wait_ms / 1000, lease_s=lease_s
        )

    async def _over(self, session_id: str) -> BoundaryView:
        """What became of a session that is not here."""
        record = await self._services.ledger.get(session_id)
        if record is None:
            raise NotFoundError(f"session {session_id!r} is not known")
        if record.phase == "ended":
            return BoundaryView(action="ended")
        if self._recovery.is_lost(record):
            raise NotFoundError(f"session {session_id!r} is lost: nobody holds its memory any more")
        return BoundaryView(action="moved", destination=record.owner, endpoint=record.endpoint)

    def _registration(self, key: str, epoch: int, tickets: tuple[Ticket, ...]) -> Registration:
        socket = str(self._services.settings.socket_path)
        return Registration(id=key, epoch=epoch, socket=socket, tickets=tickets)

    async def _held(self, session_id: str) -> Session:
        session = self._book.get(session_id)
        if session is None and self._recovery.fenced(session_id) is not None:
            raise ConflictError(
                f"session {session_id!r} is fenced: the ledger's record has not settled it yet"
            )
        if session is None:
            await self._raise_elsewhere(session_id)
            raise NotFoundError(f"session {session_id!r} is not known")
        return session

    async def _raise_elsewhere(self, session_id: str) -> None:
        record = await self._services.ledger.get(session_id)
        if record is None or record.phase == "ended":
            return
        if self._recovery.is_lost(record):
            raise NotFoundError(f"session {session_id!r} is lost: nobody holds its memory any more")
        urls = {node.name: node.url for node in await self._services.ledger.nodes()}
        raise NotOwnerError(
            f"session {session_id!r} is on node {record.owner}",
            owner=record.owner,
            owner_url=urls.get(record.owner),
        )

    async def session(self, session_id: str) -> SessionView:
        """One session, also one that another node owns.

        Raises:
            NotFoundError: the ledger does not know it, or it has ended.
        """
        session = self._book.get(session_id)
        if session is not None:
            return session.view(self._services.claim.name, self._services.url)
        fenced = self._recovery.fenced(session_id)
        if fenced is not None:
            return self._fenced(fenced)
        record = await self._services.ledger.get(session_id)
        if record is None or record.phase == "ended":
            raise NotFoundError(f"session {session_id!r} is not known")
        nodes = {node.name: node for node in await self._services.ledger.nodes()}
        return self._from_record(record, nodes)

    async def resolve(self, session_id: str, decision: Decision) -> SessionView | None:
        """An operator's decision; raises as `Resolver.resolve`. The session as it is now, if it still is."""
        await self._resolver.resolve(session_id, decision)
        session = self._book.get(session_id)
        return session.view(self._services.claim.name, self._services.url) if session else None

    async def page(self, after: str | None, limit: int) -> SessionPage:
        """Sessions of all nodes by id; those of this node with all that it knows."""
        found = await self._services.ledger.sessions(after, limit + 1)
        more, found = len(found) > limit, found[:limit]
        nodes = await self._owners(found)
        views = []
        for record in found:
            mine = self._book.get(record.session_id)
            fenced = self._recovery.fenced(record.session_id)
            if mine is not None:
                views.append(mine.view(self._services.claim.name, self._services.url))
            elif fenced is not None:
                views.append(self._fenced(fenced))
            else:
                views.append(self._from_record(record, nodes))
        last = found[-1].session_id if more else None
        views += self._unknown_to_ledger(after, last, {record.session_id for record in found})
        views.sort(key=lambda view: view.id)
        return SessionPage(sessions=tuple(views), next=last)

    async def _owners(self, found: Sequence[SessionRecord]) -> dict[str, NodeInfo]:
        """The other nodes that hold some of them, by name."""
        if all(self._book.get(record.session_id) is not None for record in found):
            return {}
        return {node.name: node for node in await self._services.ledger.nodes()}

    def _unknown_to_ledger(self, after: str | None, last: str | None, known: set[str]) -> list[SessionView]:
        """Fenced sessions between two ids that a ledger that was lost or set back has no record of."""
        return [
            self._fenced(waiting.slot)
            for name, waiting in self._recovery.unsettled.items()
            if waiting.slot.ranks.state == "fenced" and waiting.reason is not None and name not in known
            if (after or "") < name and (last is None or name < last)
        ]

    def _fenced(self, slot: Slot) -> SessionView:
        """A session that a former incarnation held, as long as no record has settled it."""
        claim = self._services.claim
        record = SessionRecord(
            session_id=slot.id,
            epoch=slot.ranks.page.epoch,
            owner=claim.name,
            incarnation=claim.incarnation,
            model=slot.manifest.model,
        )
        return Session(slot, record, self._book).view(claim.name, self._services.url)

    def _from_record(self, record: SessionRecord, nodes: Mapping[str, NodeInfo]) -> SessionView:
        owner = nodes.get(record.owner)
        lost = self._recovery.is_lost(record)
        return SessionView(
            id=record.session_id,
            model=record.model,
            owner=record.owner,
            owner_url=owner.url if owner else None,
            epoch=record.epoch,
            block=max(record.block, 0),
            state="lost" if lost else "elsewhere",
            revision=record.revision,
            bytes=record.bytes,
            ranks=record.ranks,
            block_ms=record.block_ms,
            horizon_ms=record.horizon_ms,
            endpoint=record.endpoint,
            migration_id=record.move.move_id if record.move else None,
        )

    async def end(self, session_id: str) -> None:
        """Ends a session: the record first, then memory; its worker hears it at its next boundary.

        The move that brought it may still stand in its record when its end is known; that is waited for.

        Raises:
            ConflictError: it is in a move, or the one that brought it does not get settled.
            NotFoundError, NotOwnerError: it is not here.
        """
        if self._book.get(session_id) is None and await self._resolver.end_lost(session_id):
            self._book.feed(session_id).close()
            return
        session = await self._held(session_id)
        if session.move is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._services.settings.peer_timeout_ms / 1000):
                    await session.settled.wait()
        if session.move is not None:
            raise ConflictError(f"session {session_id!r} is in move {session.move.move_id}; cancel it first")
        old = session.record
        if old.phase != "owned":
            raise ConflictError(f"session {session_id!r} has just been {old.phase}; its move is not over yet")
        await self._services.ledger.swap(old, records.end(old))
        session.record = records.end(old)
        self._book.publish(session, "ended")
        self._book.remove(session, Ended("ended by an operator"))
        self._book.feed(session_id).close()

    async def events(self, session_id: str, after: int | None) -> AsyncIterator[SessionEvent]:
        """News of a session of this node, from number `after` on, or what comes from now on."""
        feed = self._book.feed(session_id)
        async for _number, event in feed.read(feed.last if after is None else after):
            yield event

    async def digest(self, session_id: str) -> DigestView:
        """The digest of the world at its next boundary; holds it there for at most its horizon.

        Raises:
            DeadlineError: the digest would take longer than the horizon; the world has gone on.
            ConflictError: the session is in a move.
        """
        session = await self._held(session_id)
        if session.move is not None:
            raise ConflictError(f"session {session_id!r} is in a move; its receipt will hold its root")
        slot = session.slot
        horizon_s = slot.manifest.horizon_ms / 1000
        with slot.pinned() as holding:
            reader = Reader(holding, self._services.executors, slot.seed)
            await reader.open(writable=False)
            try:
                table = await reader.table()
                patience_s = max(5.0, 3 * slot.manifest.block_ms / 1000)
                pause = await slot.ranks.pause(patience_s, allow_unattended=True)
                return await _digest(session, reader, table, pause, horizon_s)
            finally:
                await reader.close()


async def _digest(
    session: Session, reader: Reader, table: LeafTable, pause: Pause, horizon_s: float
) -> DigestView:
    regions = session.slot.manifest.regions
    try:
        async with asyncio.timeout(horizon_s):
            await reader.read(table, reader.all_spans(), urgent=True)
        held_ms = (time.monotonic() - pause.stopped_at) * 1000
    except TimeoutError as error:
        raise DeadlineError(
            f"the digest of {session.id!r} takes longer than its horizon of {horizon_s * 1000:g} ms"
        ) from error
    finally:
        pause.resume()
    digests = await reader.region_digests(table)
    root = reader.sum_up(
        digests,
        session_id=session.id,
        epoch=session.record.epoch,
        block=pause.block,
        host_states=pause.host_states,
    )
    return DigestView(
        session_id=session.id,
        epoch=session.record.epoch,
        block=pause.block,
        seed=session.slot.seed,
        root=root,
        host_state=tuple(base64.b64encode(state).decode() for state in pause.host_states),
        regions=tuple(
            RegionDigest(
                name=region.name,
                dtype=region.dtype,
                shape=region.shape,
                leaf_bytes=region.leaf_bytes,
                leaves=region.leaves,
                digest=digest.hex(),
            )
            for region, digest in zip(regions, digests, strict=True)
        ),
        held_ms=held_ms,
    )


def _check_id(session_id: str) -> None:
    good = 1 <= len(session_id) <= MAX_NAME and session_id.isprintable() and "/" not in session_id
    if not good:
        raise ValidationError(
            f"id {session_id[:64]!r} must have 1 to {MAX_NAME} printable characters and no '/'", field="id"
        )
