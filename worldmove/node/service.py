"""One node: starts what it needs, lends it to its moves, and ends it in the right order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version

import structlog

from worldmove.config import Settings
from worldmove.descriptors import DescriptorDoor
from worldmove.directing import DirectRates
from worldmove.driver import Services
from worldmove.errors import WorldMoveError
from worldmove.faults.equipment import Equipment
from worldmove.hosting.host import Host
from worldmove.hosting.ranks import Change
from worldmove.hosting.slots import Slot
from worldmove.intake import MOST_LANES, Intake
from worldmove.ledger import open_ledger
from worldmove.ledger.base import Ledger
from worldmove.ledger.lease import Liveness
from worldmove.ledger.records import Claim, NodeInfo
from worldmove.memory.limits import raise_descriptor_limit
from worldmove.node.admitting import Admission
from worldmove.node.departing import Departures
from worldmove.node.devices import Devices
from worldmove.node.face import Face
from worldmove.node.heap import Heap
from worldmove.node.keepers import Keepers
from worldmove.node.lease import Lease
from worldmove.node.metrics import Metrics
from worldmove.node.moving import Moves
from worldmove.node.recovery import Recovery
from worldmove.node.registering import Registrar
from worldmove.node.returning import warrant
from worldmove.node.showing import boot_id, lane_views, peer_nodes, standby_views
from worldmove.node.snapshots import Snapshots
from worldmove.node.tenure import Tenure
from worldmove.outlet import Outlet
from worldmove.reaching import Reaches
from worldmove.sessions import Session, SessionBook
from worldmove.tasks import Tasks
from worldmove.tls import NodeTls
from worldmove.tokens import TokenFile
from worldmove.transport.pool import LanePool
from worldmove.views import NodeView, PeerNode

LEASE_S = 5.0
MOVES_AT_ONCE = 8
"""Moves away that are under way at once: more share the same links and only keep the node from answering."""
PEER_SOCKET = "peer.sock"
KEEPER_SOCKET = "keeper.sock"


class Node(Face):
    """The service behind every face: all of it is asynchronous, raises `worldmove.errors`, and never blocks.

    Args:
        settings: validated options.
        url: what other nodes and clients are told.
    """

    def __init__(self, settings: Settings, url: str) -> None:
        super().__init__()
        self.settings = settings
        self.name = settings.name
        self.url = url
        self.incarnation = 0
        self.log = structlog.get_logger().bind(node=settings.name)
        self._metrics = Metrics()
        self._boot_id = boot_id()
        self._liveness = Liveness(LEASE_S)
        self._rates: dict[str, float] = {}
        self._tasks = Tasks(self._on_task_error)
        self._lease = Lease()
        self._heap = Heap()
        self._tenure: Tenure | None = None
        self._tokens = TokenFile(settings.token_file) if settings.token_file else None
        self._tls = NodeTls.of(settings)
        self._devices = Devices(settings, self._on_process_event)
        self._executors = self._devices.executors
        self._lanes = LanePool(
            spare=settings.lanes,
            limit=MOST_LANES + settings.lanes,
            stall_ms=int(settings.stall_ms),
            device=settings.lane_device,
            faults=settings.faults,
            on_event=self._on_process_event,
        )
        self._intake = Intake(settings, self._lanes.wait_s)
        self._faults = Equipment.of(settings, keeper=lambda: self._keepers.pid)
        self._keepers = Keepers(settings.run_dir / KEEPER_SOCKET)
        self._ledger: Ledger | None = None
        self._host: Host | None = None
        self._door = DescriptorDoor(settings.run_dir / PEER_SOCKET, int(settings.peer_timeout_ms))
        self._book: SessionBook
        self._recovery: Recovery
        self._snapshots: Snapshots

    async def start(self) -> None:
        """Claims the name in the ledger and starts keeper, executors and lanes.

        Raises:
            LedgerError, ProcessLostError, ConfigError: something that a node needs cannot be had.
        """
        descriptors = raise_descriptor_limit()
        self._ledger = await open_ledger(self.settings.ledger)
        if self._faults is not None:
            self._ledger = await self._faults.start(self._ledger)
        info = NodeInfo(name=self.name, url=self.url, boot_id=self._boot_id)
        self.incarnation = await self._ledger.claim(info)
        self._tenure = Tenure(self.settings.run_dir, self.incarnation)
        keeper = await self._keepers.start()
        await self._devices.start()
        if self.settings.path != "local":
            await self._lanes.start()
        await self._door.start()
        self._host = Host(
            socket_path=self.settings.socket_path,
            incarnation=self.incarnation,
            arenas=self._devices,
            keeper=keeper,
            on_change=self._on_slot_change,
        )
        self._book = SessionBook(self.name, self.url, self._host, self._on_session)
        self._compose(self._ledger, self._host, self._tenure)
        with self._heap.building():
            found = await self._recovery.found()
        # Those with workers first, which may stand: only they have former pages.
        for slot in sorted(found, key=lambda slot: not slot.pages.former):
            self._recover(slot)
        self._host.start()
        self._tasks.spawn(self._tell_lost(), name="lost sessions")
        self._tasks.spawn(self._lease.keep(self._ledger), name="lease")
        replaced = partial(self._metrics.process_lost, "keeper")
        self._tasks.spawn(self._keepers.mind(self._host, self._ledger, replaced), name="keeper")
        self.log.info(
            "node started",
            incarnation=self.incarnation,
            url=self.url,
            recovered=len(found),
            descriptors=descriptors,
        )

    def _recover(self, slot: Slot) -> None:
        self._lost.discard(slot.id)
        self._metrics.recovered(slot.kind)
        self._tasks.spawn(self._recovery.settle(slot), name=f"recover {slot.id}")

    async def _tell_lost(self) -> None:
        self._lost = await self._recovery.lost()
        if self._host is not None:
            self._lost -= self._host.sessions.keys()

    async def fenced(self) -> None:
        """Returns when a later incarnation has claimed this node's name: nothing is left but to `abort`."""
        await self._lease.lost.wait()

    def _compose(self, ledger: Ledger, host: Host, tenure: Tenure) -> None:
        services = Services(
            settings=self.settings,
            claim=Claim(self.name, self.incarnation),
            url=self.url,
            boot_id=self._boot_id,
            ledger=ledger,
            lanes=self._lanes,
            direct=self._devices.direct,
            direct_rates=DirectRates(),
            reaches=Reaches(self._executors.gpus),
            rings=self._devices.rings,
            executors=self._executors,
            intake=self._intake,
            outlet=Outlet(self.settings.egress_rate),
            door=self._door,
            turns=asyncio.Semaphore(MOVES_AT_ONCE),
            faults=self._faults.rig if self._faults is not None else None,
            note_rate=self._note_rate,
        )
        self._recovery = Recovery(services, host, self._book, tenure.alone)
        host.returns.warrant = warrant(services, self._recover)
        self._snapshots = Snapshots(services, host, tenure.alone, self._metrics.snapshot_taken)
        self._registrar = Registrar(services, host, self._book, self._recovery, self._snapshots)
        where = services, self._boot_id, host, self._book, self._devices
        admission = Admission(*where, gone=self._recovery.gone)
        departures = Departures(
            services,
            self._book,
            self._devices,
            peer_token=self._peer_token,
            peer_tls=lambda: self._tls.client,
        )
        self._moves = Moves(services, self._book, admission, self._metrics, departures)

    def _peer_token(self) -> str | None:
        return self._tokens.current().first("peer") if self._tokens else None

    def _note_rate(self, path: str, nbytes: int, seconds: float) -> None:
        self._rates[path] = nbytes * 8 / seconds / 1e9
        self._metrics.path_rate(path, self._rates[path])

    def _on_session(self, session: Session) -> None:
        self._snapshots.watch(self._book, session)
        self._heap.holds(len(self._book), moving=len(self._moves) > 0)

    def _on_slot_change(self, slot: Slot, change: Change) -> None:
        self.log.info("workers", slot=slot.id, change=change)
        self._moves.on_slot_change(slot, change)
        self._book.on_slot_change(slot, change)

    def _on_process_event(self, event: str, facts: Mapping[str, object]) -> None:
        kind, _, what = event.partition("-")
        if what == "lost":
            self._metrics.process_lost(kind)
        self.log.info(event, **facts)

    def _on_task_error(self, error: BaseException) -> None:
        self.log.error("background task failed", exc_info=error)

    async def close(self) -> None:
        """Finishes or rolls back every move, then ends what it started. Worlds and keeper stay."""
        if self._ledger is not None and self._host is not None:
            await self._moves.close()
        await self._stop()
        self.log.info("node closed")

    async def abort(self) -> None:
        """Ends at once; every move is left to the ledger's record."""
        if self._host is not None:
            await self._moves.abort()
        await self._stop()

    async def _stop(self) -> None:
        await self._tasks.cancel()
        if self._host is not None:
            await self._snapshots.close()
        if self._faults is not None:
            await self._faults.close()
        await self._door.close()
        if self._host is not None:
            await self._host.close()
        await self._lanes.close()
        await self._devices.close()
        await self._keepers.close()
        if self._ledger is not None:
            await self._lease.end(self._ledger)
        if self._tenure is not None:
            await self._tenure.end()

    async def ready(self) -> list[str]:
        """What is missing before moves can be accepted; empty when ready."""
        missing = self._devices.missing()
        if not self._lanes.lanes and self.settings.path != "local":
            missing.append("lanes")
        if self._ledger is None:
            return [*missing, "ledger"]
        try:
            await self._ledger.ping()
        except WorldMoveError:
            missing.append("ledger")
        return missing

    async def nodes(self) -> list[PeerNode]:
        """All nodes in the ledger, and whether they renew their leases."""
        if self._ledger is None:
            return []
        found = await self._ledger.nodes()
        return peer_nodes(found, self._liveness.observe(found, time.monotonic()))

    async def view(self) -> NodeView:
        """This node."""
        return NodeView(
            name=self.name,
            incarnation=self.incarnation,
            version=version("worldmove"),
            url=self.url,
            boot_id=self._boot_id,
            devices=await self._devices.views(),
            path_gbps=dict(self._rates),
            **self._intake.shown(),
            lanes=lane_views(self._lanes, self._devices.direct),
            executors=tuple(self._executors.pids),
            keeper=self._keepers.pid,
            sessions=len(self._book),
            standbys=standby_views(self._host),
            migrations=len(self._moves),
        )

    def metrics(self) -> bytes:
        """Prometheus text."""
        states = self._book.states()
        states["lost"] += len(self._lost)
        states["fenced"] += sum(one.slot.session_id is not None for one in self._recovery.unsettled.values())
        gauges = {
            "standbys": len(self._host.standbys) if self._host else 0,
            "moves_running": len(self._moves),
            "lanes": len(lane_views(self._lanes, self._devices.direct)),
            "executors": len(self._executors.pids),
            "memory_free_bytes": self._devices.budget.free,
            "reserved_bytes_per_second": self._intake.reserved,
            "incarnation": self.incarnation,
        }
        return self._metrics.render(sessions=dict(states), gate=self._intake.gate.view(), gauges=gauges)
