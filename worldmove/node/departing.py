"""Sessions that are to leave: where they are, where they go, and what the node there is asked."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import defaultdict
from collections.abc import Callable

import msgspec

from worldmove import messages as m
from worldmove.directing import reachable
from worldmove.driver import Services
from worldmove.errors import NotFoundError, NotOwnerError, PeerError
from worldmove.ledger.records import NodeInfo
from worldmove.node.asking import check_elsewhere, device_map, positive, refused
from worldmove.node.devices import Devices
from worldmove.node.peers import ClientChannel, connect_peer
from worldmove.receipts import rejection_error
from worldmove.sessions import Session, SessionBook
from worldmove.views import DryRun, MigrationRequest

CONNECTING = 4
"""Control connections that are opened to one node at once: it answers others meanwhile."""


class Departures:
    """Turns requests for moves into what their destination is told.

    Args:
        services: of the node.
        book: the node's sessions.
        devices: of this node.
        peer_token: the bearer token for other nodes, or `None` where there are no tokens.
        peer_tls: for connections to nodes that serve TLS.
    """

    def __init__(
        self,
        services: Services,
        book: SessionBook,
        devices: Devices,
        *,
        peer_token: Callable[[], str | None],
        peer_tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self._services = services
        self._book = book
        self._devices = devices
        self._peer_token = peer_token
        self._peer_tls = peer_tls
        self._connecting: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(CONNECTING)
        )

    async def locate(self, request: MigrationRequest) -> tuple[Session, NodeInfo, dict[str, str]]:
        """The session, the node that it is to go to, and where the regions of which device are to lie.

        Raises:
            NotFoundError: the session or the node is not known.
            NotOwnerError: the session is on another node, which the error names.
            SamePlaceError, ValidationError: it is where it is to go, or a device of the request is not one.
        """
        ledger, name = self._services.ledger, self._services.claim.name
        session = self._book.get(request.session_id)
        nodes = {node.name: node for node in await ledger.nodes()}
        if session is None:
            record = await ledger.get(request.session_id)
            if record is None or record.phase == "ended":
                raise NotFoundError(f"session {request.session_id!r} is not known")
            owner = nodes.get(record.owner)
            raise NotOwnerError(
                f"session {request.session_id!r} is on node {record.owner}",
                owner=record.owner,
                owner_url=owner.url if owner else None,
            )
        manifest, named = session.slot.manifest, self._devices.named
        devices = device_map(request.devices, manifest, named)
        if request.destination == name:
            devices = {source: named(destination) for source, destination in devices.items()}
            check_elsewhere(session.id, name, manifest, devices)
        if request.destination not in nodes:
            known = sorted(set(nodes) - {name})
            raise NotFoundError(f"node {request.destination!r} is not known; known: {known}", nodes=known)
        return session, nodes[request.destination], devices

    def hello(
        self, session: Session, request: MigrationRequest, move_id: str, devices: dict[str, str]
    ) -> m.Hello:
        """What the destination is told first; ValidationError if a time of the request is none."""
        services, manifest = self._services, session.slot.manifest
        horizon_ms = positive("horizon_ms", request.horizon_ms, manifest.horizon_ms)
        deadline_ms = positive("deadline_ms", request.deadline_ms, services.settings.deadline_ms)
        return m.Hello(
            move_id=move_id,
            session_id=session.id,
            source=services.claim.name,
            source_incarnation=services.claim.incarnation,
            boot_id=services.boot_id,
            epoch=session.record.epoch,
            seed=session.slot.seed,
            manifest=manifest,
            fingerprint=session.slot.fingerprint,
            live=request.live,
            path=request.path or services.settings.path,
            socket=str(services.door.path),
            horizon_ms=horizon_ms,
            deadline_ms=deadline_ms,
            allow_unattended=request.allow_unattended,
            devices=devices,
            terms=services.intake.terms(
                manifest, session.dirty_rate, services.outlet.left(deadline_ms / 1000)
            ),
            direct=reachable(session.slot.holding, services.direct),
        )

    async def connect(self, node: NodeInfo, move_id: str) -> ClientChannel:
        """The control connection of a move, in this node's turn; PeerError if the node cannot be reached."""
        async with self._connecting[node.name]:
            return await self._call(node, move_id)

    async def _call(self, node: NodeInfo, move_id: str) -> ClientChannel:
        timeout_ms = self._services.settings.peer_timeout_ms
        return await connect_peer(node.url, move_id, self._peer_token(), timeout_ms, self._peer_tls())

    async def dry_run(self, request: MigrationRequest) -> DryRun:
        """Whether the destination would admit the move now; nothing is reserved."""
        session, node, devices = await self.locate(request)
        move_id = f"dry-{secrets.token_hex(8)}"
        hello = msgspec.structs.replace(self.hello(session, request, move_id, devices), dry_run=True)
        required = {"state_bytes": float(session.slot.manifest.nbytes)}
        timeout_ms = self._services.settings.peer_timeout_ms
        try:
            channel = await self._call(node, move_id)
            try:
                await channel.send(m.encode(hello))
                async with asyncio.timeout(timeout_ms / 1000):
                    answer = m.decode(await channel.receive())
            finally:
                await channel.close()
        except TimeoutError as error:
            raise PeerError(f"node {node.name} gave no verdict within {timeout_ms:g} ms") from error
        if isinstance(answer, m.Rejected):
            return refused(self._services.outlet.advised(rejection_error(answer)), required)
        if not isinstance(answer, m.Admitted):
            raise PeerError(f"node {node.name} gave no verdict")
        return DryRun(
            admissible=True,
            required=required | answer.required,
            available=answer.available,
            unmeasured=answer.unmeasured,
            provisional=answer.provisional,
        )
