"""A session that travels between the nodes of a fleet, followed byte by byte by the test's own twin."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

from fleet_kit import Actor, Fleet, Twin, assert_world
from fleet_stack import FINGERPRINT
from fleet_world import SHARE

from worldmove.manifest import Manifest, Region
from worldmove.timeline import MOST_BLOCKS
from worldmove.views import MigrationView, Receipt, SessionSpec

WAYS = (("local", True), ("staged", True), ("staged", False), ("local", False))
"""Path and `live` of four moves: there and back, twice."""
SETTLED_S = 60.0


class Standing:
    """Stacks of all ranks that stand by at a node, and the worlds that they wait for."""

    def __init__(self, actors: list[Actor], opened: dict[str, Any]) -> None:
        self.actors = actors
        self.id: str = opened["id"]
        self.arriving: list[Future[Any]] = [actor.tell("wait") for actor in actors]

    def arrived(self) -> list[dict[str, Any]]:
        """What each rank has been handed."""
        return [future.result(SETTLED_S) for future in self.arriving]


class Traveller:
    """One session, its stacks, and its twin.

    Args:
        fleet: where it travels.
        session: begin of its id.
        regions: of all ranks.
        at: the node where it is registered.
        host: `bytes`, `lazy` or `none`.
        share: a block rewrites one part in so many.
        pad: bytes that are appended to each host state.
        spec: more fields of the registration and of every standby.

    Attributes:
        actors: those that hold it now, by rank. twin: what every byte should be. seed: unknown to it.
    """

    def __init__(
        self,
        fleet: Fleet,
        session: str,
        regions: Sequence[Region],
        *,
        at: str = "A",
        host: str = "bytes",
        share: int = SHARE,
        pad: int = 0,
        **spec: Any,
    ) -> None:
        self.fleet = fleet
        self.session = fleet.unique(session)
        self.twin = Twin(regions, host=host, share=share, pad=pad)
        self.at = at
        self._use = {"host": host, "share": share, "pad": pad}
        self._spec = spec
        self._stacks: dict[str, list[Actor]] = {}
        self.actors = self._at(at)
        opened = self.actors[0].register(self.session, regions, **spec)
        for actor, ticket in zip(self.actors[1:], opened["tickets"], strict=True):
            actor.ask("join", ticket=ticket)
        self.epoch: int = opened["epoch"]

    @property
    def regions(self) -> list[Region]:
        """As they are now, after revisions."""
        return list(self.twin.regions.values())

    def _at(self, node: str) -> list[Actor]:
        if node not in self._stacks:
            ranks = max((region.rank for region in self.regions), default=0) + 1
            self._stacks[node] = [self.fleet.actor(node) for _ in range(ranks)]
        return self._stacks[node]

    def replace(self, node: str) -> None:
        """What stands by at `node` is given up; other stacks will stand by there."""
        for standby in self.fleet[node].view().standbys:
            self.fleet[node].client.drop_standby(standby.id)
        del self._stacks[node]

    def run(self, work_ms: float = 5.0) -> None:
        """All ranks generate freely."""
        for actor in self.actors:
            actor.run(work_ms, **self._use)

    def step(self, blocks: int = 1) -> None:
        """All ranks generate so many blocks, side by side."""
        told = []
        for actor in self.actors:
            actor.ask("use", **self._use)
            told.append(actor.tell("step", n=blocks))
        for future in told:
            future.result(SETTLED_S)

    def stand_by(self, to: str, **spec: Any) -> Standing:
        """Stacks at `to` stand by for it and wait; its memory there is poisoned."""
        actors = self._at(to)
        opened = actors[0].standby(self.regions, **{**self._spec, **spec})
        for actor, ticket in zip(actors[1:], opened["tickets"], strict=True):
            actor.ask("join_standby", ticket=ticket)
        for region in self.regions[:100]:
            actors[region.rank].ask("poke", name=region.name, offset=0, hex="a5" * min(region.nbytes, 64))
        return Standing(actors, opened)

    def arrive(self, standing: Standing, to: str) -> None:
        """It has moved: takes over at `to`, where every byte must be right, also after further blocks."""
        arrived = standing.arrived()
        left = [actor.event("moved") for actor in self.actors]
        assert {event["destination"] for event in left} == {to}
        assert {event["block"] for event in left} == {each["block"] for each in arrived}
        assert {each["epoch"] for each in arrived} == {self.epoch + 1}
        self.take(standing.actors, to)

    def take(self, actors: list[Actor], at: str) -> None:
        """Follows it to its new stacks and checks them."""
        self.actors, self.at, self.epoch = actors, at, self.epoch + 1
        assert_world(actors, self.twin)
        self.step(2)
        assert_world(actors, self.twin, host_state=False)

    def go(self, to: str, **request: Any) -> Receipt:
        """Moves while it generates, and checks every byte at the destination.

        Args:
            to: a node's name.
            request: fields of the migration request.
        """
        standing = self.stand_by(to)
        self.run()
        receipt = self.fleet.moved(self.session, to, **request)
        source, state_bytes = self.at, sum(region.nbytes for region in self.regions)
        self.arrive(standing, to)
        check_receipt(receipt, source, to, state_bytes=state_bytes, epoch=self.epoch)
        assert receipt.path == request.get("path", receipt.path)
        assert receipt.live == request.get("live", True)
        return receipt

    def halted(self) -> None:
        """Stops free generation, and checks every byte where it is."""
        for actor in self.actors:
            actor.ask("halt")
            actor.ask("use", **self._use)
        behind = max(actor.block for actor in self.actors)
        for actor in self.actors:
            actor.ask("step", n=behind - actor.block)
        assert_world(self.actors, self.twin, host_state=False)


def check_receipt(receipt: Receipt, source: str, to: str, *, state_bytes: int, epoch: int) -> None:
    """What holds for the receipt of every move that went well and met no damage."""
    assert (receipt.state, receipt.source, receipt.destination) == ("released", source, to)
    assert receipt.source_root is not None
    assert len(receipt.source_root) == 64
    assert receipt.source_root == receipt.destination_root
    assert receipt.epoch == epoch
    assert receipt.state_bytes == state_bytes
    assert receipt.sent_bytes == sum(each.bytes for each in receipt.rounds)
    assert [each.number for each in receipt.rounds] == list(range(1, len(receipt.rounds) + 1))
    assert [each.final for each in receipt.rounds] == [False] * (len(receipt.rounds) - 1) + [True]
    last = receipt.rounds[-1]
    assert last.bytes - last.again_bytes + receipt.kept_bytes + receipt.copied_bytes == state_bytes
    if not receipt.live:
        assert len(receipt.rounds) == 1
    assert (receipt.lanes > 0) == (receipt.path in ("staged", "direct"))
    assert receipt.damaged == ()
    assert receipt.repair_bytes == 0
    assert not receipt.missed
    times = (receipt.pause_ms, receipt.data_ms, receipt.commit_ms, receipt.resume_ms)
    pause, data, commit, resume = (time for time in times if time is not None)
    assert min(data, commit, resume) >= 0
    assert abs(pause - data - commit - resume) < 1e-6
    assert pause <= receipt.total_ms
    assert receipt.code is None
    check_timeline(receipt)


def check_timeline(receipt: Receipt) -> None:
    """What holds for the times of a move that went well: in order, and at one with its pause."""
    starts, blocks = [each.start_ms for each in receipt.rounds], receipt.blocks
    assert receipt.stopped_ms is not None
    assert receipt.resumed_ms is not None
    assert abs(receipt.resumed_ms - receipt.stopped_ms - (receipt.pause_ms or 0)) < 1e-6
    order = [start for start in starts if start is not None]
    order.insert(-1, receipt.stopped_ms)
    assert len(order) == len(starts) + 1
    assert order == sorted(order), "live rounds, then the world stands, then the last round"
    assert order[0] > 0
    assert order[-1] < receipt.resumed_ms <= receipt.total_ms
    assert len(blocks) <= MOST_BLOCKS
    assert all(one.number < other.number and one.ms <= other.ms for one, other in pairwise(blocks))
    if blocks:
        assert (blocks[-1].number, blocks[-1].ms) == (receipt.block, receipt.stopped_ms)


def spec_for(regions: Sequence[Region], session: str | None = None, **more: Any) -> SessionSpec:
    """A registration over REST that fits the standbys of the fleet's actors."""
    base: dict[str, Any] = {"block_ms": 10.0, "horizon_ms": 10_000.0, "host_state_bytes": 4096}
    manifest = Manifest(model="fleet", regions=tuple(regions), **{**base, **more})
    return SessionSpec(manifest=manifest, fingerprint=dict(FINGERPRINT), id=session)


def receipt_of(view: MigrationView) -> Receipt:
    """The receipt of an ended move."""
    assert view.receipt is not None
    return view.receipt
