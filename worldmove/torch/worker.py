"""Registers nested states with a node: what a PyTorch serving stack calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from worldmove.errors import ValidationError
from worldmove.manifest import Region
from worldmove.torch.arena import SPILL_STEP, regions_of, spill_regions
from worldmove.torch.walk import blocks, walk
from worldmove.torch.world import TorchStandby, TorchWorld
from worldmove.worker import Worker

HOST_STATE_BYTES = 1 << 20


def state_regions(
    state: Any,
    *,
    rank: int = 0,
    spill_bytes: int = SPILL_STEP,
    stride_bytes: Mapping[str, int] | None = None,
) -> tuple[Region, ...]:
    """The regions that a state becomes, without reading a byte of it.

    Args:
        state: nested dicts, lists and tuples of tensors, arrays, generators and plain values.
        rank: whose state it is.
        spill_bytes: room on each device for tensors that appear or grow later; 0 for none.
        stride_bytes: what rolling caches shift by at each block, by name of the region or pattern (`kv.*.k`).

    Raises:
        ValidationError: the state holds something that can't be moved.
        DeviceError: a GPU that owns a tensor can't be named.
    """
    strides = dict(stride_bytes or {})

    def stride_of(name: str) -> int | None:
        return next((stride for pattern, stride in strides.items() if fnmatchcase(name, pattern)), None)

    walked = walk(state)
    found = blocks(walked.leaves)
    regions = regions_of(found, rank, stride_of)
    owners = sorted({leaf.device for leaf in walked.leaves}, key=lambda device: (device.type, device.index))
    if spill_bytes:
        regions += spill_regions(owners, spill_bytes, rank)
    return tuple(regions)


class TorchWorker:
    """Registers nested states.

    Args:
        worker: of `worldmove.worker`, or the URL of the node.
    """

    def __init__(self, worker: Worker | str) -> None:
        self.worker = Worker(worker) if isinstance(worker, str) else worker

    def __enter__(self) -> TorchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes REST connections; worlds and standbys live on."""
        self.worker.close()

    def register(
        self,
        id: str | None,  # noqa: A002 - the contract's name
        state: Any,
        *,
        place: bool = True,
        rank: int = 0,
        spill_bytes: int = SPILL_STEP,
        stride_bytes: Mapping[str, int] | None = None,
        others: Iterable[Region] = (),
        host_state_bytes: int = HOST_STATE_BYTES,
        **more: Any,
    ) -> TorchWorld:
        """Registers a session with a state.

        Args:
            id: of the session; the node chooses one if `None`.
            state: nested, as it is before the first block.
            place: copies its tensors into the session's memory; `world.state` is the same structure whose
                tensors lie there, and is what blocks have to write. Otherwise tensors stay where they are,
                and are copied each time a move wants them.
            rank: whose state it is.
            spill_bytes: room on each device for tensors that appear or grow later.
            stride_bytes: what rolling caches shift by at each block, by name of the region or pattern.
            others: regions of the other ranks, by their own `state_regions`.
            host_state_bytes: the most that everything beside the tensors may take, written down.
            more: `block_ms`, `horizon_ms` and the rest of `Worker.register`.

        Raises:
            ValidationError: the state holds something that can't be moved; the message says where.
            WorldMoveError: as `Worker.register`.
        """
        regions = state_regions(state, rank=rank, spill_bytes=spill_bytes, stride_bytes=stride_bytes)
        world = self.worker.register(
            id, regions=_together(regions, others), rank=rank, host_state_bytes=host_state_bytes, **more
        )
        return _placed(TorchWorld(world, state), state, place=place)

    def standby(
        self,
        template: Any = None,
        *,
        regions: Iterable[Region] | None = None,
        rank: int = 0,
        spill_bytes: int = SPILL_STEP,
        stride_bytes: Mapping[str, int] | None = None,
        others: Iterable[Region] = (),
        host_state_bytes: int = HOST_STATE_BYTES,
        **more: Any,
    ) -> TorchStandby:
        """Stands by for a session with the same regions; arguments as of `register`.

        Args:
            template: a state with tensors of the same paths, types and shapes, as the stack makes it before
                its first block. It is copied into the standby's memory.
            regions: instead of a template, `TorchWorld.regions` of the session.
            rank: as of `register`, like all others.
            spill_bytes: the same.
            stride_bytes: the same.
            others: the same.
            host_state_bytes: the same.
            more: the same.

        Raises:
            ValidationError: neither or both of template and regions were given; else as `register`.
        """
        if (template is None) == (regions is None):
            raise ValidationError("either a template or regions are needed", field="regions")
        if regions is None:
            mine = state_regions(template, rank=rank, spill_bytes=spill_bytes, stride_bytes=stride_bytes)
            regions = _together(mine, others)
        regions = tuple(regions)
        standby = self.worker.standby(regions=regions, rank=rank, host_state_bytes=host_state_bytes, **more)
        return TorchStandby(standby, regions, rank, template)

    def attach(self, id: str, **more: Any) -> TorchWorld:  # noqa: A002 - the contract's name
        """Takes up a session whose worker has gone, if that kept its state at boundaries (`keep=True`)."""
        return TorchWorld(self.worker.attach(id, **more))

    def join(self, ticket: str, state: Any, *, place: bool = True) -> TorchWorld:
        """Takes another rank of a session, with one of its tickets (`world.world.tickets`)."""
        return _placed(TorchWorld(self.worker.join(ticket), state), state, place=place)

    def join_standby(
        self, ticket: str, regions: Iterable[Region], *, rank: int, template: Any = None
    ) -> TorchStandby:
        """Takes another rank of a standby, with one of its tickets and the regions of all ranks."""
        return TorchStandby(self.worker.join_standby(ticket), tuple(regions), rank, template)


def _placed(world: TorchWorld, state: Any, *, place: bool) -> TorchWorld:
    if place:
        world.state = world.place(state)
    return world


def _together(mine: Iterable[Region], others: Iterable[Region]) -> tuple[Region, ...]:
    """All regions of a session: by rank, so that every rank names the same order."""
    return tuple(sorted((*mine, *others), key=lambda region: region.rank))
