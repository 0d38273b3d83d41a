"""The worker SDK: what a serving stack calls.

    from worldmove.worker import Worker

    worker = Worker("http://127.0.0.1:8001")
    world = worker.register("world-7", model="m", regions=[...], block_ms=750, horizon_ms=250)
    k = world.tensor("layer07.k")
    while True:
        with world.block():
            generate_block(k)
        world.boundary(host_state)

Everything here is synchronous and belongs to one thread. `docs/worker-protocol.md` says what goes over
the wire, for stacks in other languages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from worldmove import fingerprint as prints
from worldmove.errors import (
    ConflictError,
    SessionEndedError,
    SessionMoved,
    ValidationError,
    WorldMoveError,
)
from worldmove.ipc import close_all
from worldmove.manifest import Manifest, Region, Source, validate
from worldmove.sdk.link import Link
from worldmove.sdk.memory import as_region
from worldmove.sdk.own import own_region, own_regions
from worldmove.sdk.rest import NodeApi, session_path, standby_path
from worldmove.sdk.tickets import Ticket, read_ticket, write_ticket
from worldmove.sdk.world import HostState, Standby, World, map_rank
from worldmove.views import Registration

__all__ = [
    "HostState",
    "Region",
    "SessionEndedError",
    "SessionMoved",
    "Source",
    "Standby",
    "Worker",
    "World",
    "WorldMoveError",
    "own_region",
]

T = TypeVar("T")


class Worker:
    """Registers worlds and standbys with one node.

    Args:
        url: of the node, on this host: descriptors come over its Unix socket.
        token: bearer token of the role `worker`, where the node wants one.
        timeout: seconds for one REST call; registering includes allocating the memory.
        tls_ca: PEM file of the authorities that are trusted with an `https` node; the system's if left out.

    Raises:
        ConfigError: `tls_ca` can't be used.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        tls_ca: Path | str | None = None,
    ) -> None:
        self.url = url
        self._api = NodeApi(url, token, timeout, tls_ca)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes REST connections; worlds and standbys live on."""
        self._api.close()

    def register(
        self,
        id: str | None = None,  # noqa: A002 - the contract's name
        *,
        regions: Iterable[Region | Mapping[str, Any]],
        block_ms: float,
        horizon_ms: float,
        host_state_bytes: int = 64 * 1024,
        model: str = "unnamed",
        endpoint: str | None = None,
        fingerprint: Mapping[str, str] | None = None,
        rank: int = 0,
        snapshot_every: int = 0,
        memory: Mapping[str, Any] | None = None,
    ) -> World:
        """Registers a new session; its memory is zero, its block 0.

        Args:
            id: of the session; the node chooses one if left out.
            regions: all regions of all ranks, `Region` or mappings with its fields.
            block_ms: how long a block takes.
            horizon_ms: how long viewers can go without one.
            host_state_bytes: the most that `boundary` is given.
            model: name of the model.
            endpoint: where the session's viewers are served while it is here.
            fingerprint: what must be equal on a destination, best from `worldmove.fingerprint.collect`;
                if left out, that of this process.
            rank: which one this process is; the others use `world.tickets` with `join`.
            snapshot_every: blocks from one spare copy of the state to the next; the world can then be taken
                up from there when its workers die inside a block. Takes the state's memory again. 0: none.
            memory: regions that the stack has allocated itself on a GPU, by name: see `own_region`. They stay
                where they are; such a world lies in memory of nodes after its first move, and before that it
                is lost with this process.

        Raises:
            SessionExistsError, ManifestError, NoMemoryError, UnauthorizedError: the node refused.
            PeerError, ConnectionLostError: the node can't be reached by REST, by its socket.
        """
        own = memory or {}
        regions = own_regions((as_region(region) for region in regions), own)
        manifest = _manifest(
            model, regions, block_ms, horizon_ms, host_state_bytes=host_state_bytes, endpoint=endpoint
        )
        manifest = msgspec.structs.replace(manifest, snapshot_every=snapshot_every)
        validate(manifest)
        body = _body(manifest, fingerprint)
        if id is not None:
            body["id"] = id
        take = partial(self._world, own=own)
        return self._join_all(self._api.open("/v1/sessions", body), rank, take)

    def standby(
        self,
        *,
        regions: Iterable[Region | Mapping[str, Any]],
        block_ms: float,
        horizon_ms: float,
        host_state_bytes: int = 64 * 1024,
        model: str = "unnamed",
        endpoint: str | None = None,
        fingerprint: Mapping[str, str] | None = None,
        rank: int = 0,
    ) -> Standby:
        """Stands by on this node for a session with exactly these regions; arguments as of `register`."""
        manifest = _manifest(
            model, regions, block_ms, horizon_ms, host_state_bytes=host_state_bytes, endpoint=endpoint
        )
        registration = self._api.open("/v1/standbys", _body(manifest, fingerprint))
        return self._join_all(registration, rank, self._standby)

    def attach(
        self,
        id: str,  # noqa: A002 - the contract's name
        *,
        fingerprint: Mapping[str, str] | None = None,
        devices: Sequence[str] = (),
        rank: int | None = None,
    ) -> World:
        """Takes up a session whose worker has gone, at its last boundary; `world.host_state` is of there.

        Args:
            id: of the session.
            fingerprint: as of `register`.
            devices: where it is left out: UUIDs of the GPUs on which the session lies, in its regions' order.
            rank: which one; the lowest free one if left out.

        Raises:
            NotFoundError, NotOwnerError: no such session on this node.
            ConflictError: its worker lives, or left in the middle of a block.
            FingerprintMismatchError: this process would not generate the same bits.
        """
        if fingerprint is None:
            fingerprint = prints.collect(model=self._api.session(id).model, devices=devices)
        registration = self._api.open(f"{session_path(id)}/attach", {"fingerprint": dict(fingerprint)})
        free = min(ticket.rank for ticket in registration.tickets)
        return self._join_all(registration, free if rank is None else rank, self._world)

    def join(self, ticket: str, *, memory: Mapping[str, Any] | None = None) -> World:
        """Takes another rank of a session, with one of its `tickets`.

        Args:
            ticket: one of `World.tickets`.
            memory: of this rank, where it was registered as `own_region` of this process described it.
        """
        return self._world(read_ticket(ticket), (), own=memory)

    def join_standby(self, ticket: str) -> Standby:
        """Takes another rank of a standby, with one of its `tickets`."""
        return self._standby(read_ticket(ticket), ())

    def end(self, id: str) -> None:  # noqa: A002 - the contract's name
        """Ends a session: its worker hears it at the next boundary, its memory goes."""
        self._api.end(session_path(id))

    def _join_all(
        self,
        registration: Registration,
        rank: int,
        take: Callable[[Ticket, tuple[str, ...]], T],
    ) -> T:
        tickets = {
            each.rank: Ticket(registration.id, registration.socket, each.rank, each.token)
            for each in registration.tickets
        }
        if rank not in tickets:
            raise ValidationError(f"rank is {rank}; allowed: {sorted(tickets)}", field="rank")
        others = tuple(write_ticket(ticket) for number, ticket in tickets.items() if number != rank)
        return take(tickets[rank], others)

    def _world(self, ticket: Ticket, others: tuple[str, ...], own: Mapping[str, Any] | None = None) -> World:
        link, fds = Link.enter(ticket.socket, ticket.token)
        welcome = link.welcome
        if welcome.session_id is None:
            close_all(fds)
            link.close()
            raise ConflictError("the ticket is a standby's; join_standby takes it")
        memory = map_rank(link, fds, own)
        block = link.page.block(welcome.rank)
        known = link.page.has_host_state(welcome.rank, block)
        state = link.page.host_state(welcome.rank, block) if known else b""
        world = World(
            welcome.session_id,
            welcome.epoch,
            link,
            memory,
            block=block,
            host_state=state,
            tickets=others,
        )
        world.settle(None)
        return world

    def _standby(self, ticket: Ticket, others: tuple[str, ...]) -> Standby:
        link, fds = Link.enter(ticket.socket, ticket.token)
        if link.welcome.session_id is not None:
            close_all(fds)
            link.close()
            raise ConflictError("the ticket is a session's; join takes it")
        memory = map_rank(link, fds)
        path = standby_path(ticket.id)
        return Standby(ticket.id, link, memory, others, lambda: self._api.end(path))


def _manifest(
    model: str,
    regions: Iterable[Region | Mapping[str, Any]],
    block_ms: float,
    horizon_ms: float,
    *,
    host_state_bytes: int,
    endpoint: str | None,
) -> Manifest:
    manifest = Manifest(
        model=model,
        regions=tuple(as_region(region) for region in regions),
        block_ms=float(block_ms),
        horizon_ms=float(horizon_ms),
        host_state_bytes=host_state_bytes,
        endpoint=endpoint,
    )
    validate(manifest)
    return manifest


def _body(manifest: Manifest, fingerprint: Mapping[str, str] | None) -> dict[str, Any]:
    if fingerprint is None:
        owners = [region.device for region in manifest.regions if region.device != "host"]
        fingerprint = prints.collect(model=manifest.model, devices=tuple(dict.fromkeys(owners)))
    body: dict[str, Any] = {
        "model": manifest.model,
        "regions": msgspec.to_builtins(manifest.regions),
        "block_ms": manifest.block_ms,
        "horizon_ms": manifest.horizon_ms,
        "host_state_bytes": manifest.host_state_bytes,
        "fingerprint": dict(fingerprint),
    }
    if manifest.snapshot_every:
        body["snapshot_every"] = manifest.snapshot_every
    if manifest.endpoint is not None:
        body["endpoint"] = manifest.endpoint
    return body
