"""A world whose stack hands over a nested state instead of writing into named regions."""

from __future__ import annotations

from typing import Any

from worldmove.errors import ConflictError, ValidationError
from worldmove.manifest import Region
from worldmove.sdk.world import Standby, World
from worldmove.torch import format as fmt
from worldmove.torch.arena import SPILL, SPILL_STEP, Arena, device_name, is_spill, prefix
from worldmove.torch.build import build
from worldmove.torch.pack import pack
from worldmove.torch.walk import blocks, walk

State = Any
"""Nested dicts, lists and tuples of tensors, arrays, generators and plain values; or a callable for it."""


class TorchWorld:
    """One rank of a session, by its state.

    Attributes:
        world: the session underneath, for everything else.
        state: as it came, or as it was registered; its tensors lie in the session's regions unless it was
            registered with `place=False`.
    """

    def __init__(self, world: World, state: Any = None) -> None:
        """Takes a world over.

        Args:
            world: of `Worker.register`, `attach` or `Standby.wait`.
            state: what the stack works on; if left out, the one that came with the world.

        Raises:
            ValidationError: no state came with it that can be restored.
        """
        self.world = world
        self._arena = Arena(world.tensor, world.regions, world.rank)
        self.state = self.restored() if state is None else state

    @property
    def id(self) -> str:
        """Of the session."""
        return self.world.id

    @property
    def block_number(self) -> int:
        """The last finished block."""
        return self.world.block_number

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions as they are now: what a standby for this session must be registered with."""
        return self.world.regions

    def block(self) -> Any:
        """Context in which a block is generated; see `World.block`."""
        return self.world.block()

    def boundary(self, state: State, *, keep: bool = False) -> None:
        """Ends a block. Looks at the state only if a move wants it, and then brings it into the regions.

        Args:
            state: as it is now, or a callable that is only asked when the state is wanted. It may be another
                object at each boundary, with other tensors in it.
            keep: looks at it in any case, so that another worker can take the world up should this one die.

        Raises:
            SessionMoved, SessionEndedError: as `World.boundary`.
            ValidationError: the state holds something that can't be moved. The block is finished, and the
                world may go on here; the move takes the next state that can be, or is given up in time.
            ManifestError: what lies beside the tensors is longer than `host_state_bytes`; otherwise the same.
        """
        if not keep:
            self.world.boundary(lambda: self._pack(state))
            return
        packed = pack(_now(state), self._arena, None)
        if packed is not None:
            self.world.boundary(fmt.encode(packed.document))
            return
        self.world.boundary(lambda: self._pack(state))
        self.refit(state)

    def refit(self, state: State) -> bool:
        """Makes room for what has appeared or grown in the state, between two blocks.

        A move that finds too little room revises the session's regions and aborts for it. A stack that knows
        that its state has changed calls this; then only standbys of the new `regions` fit.

        Returns:
            Whether the regions were revised.

        Raises:
            ConflictError: called inside a block.
            ValidationError: the state holds something that can't be moved.
            ManifestError, NoMemoryError: from `World.revise`.
        """
        wanted = self._arena.place(blocks(walk(_now(state)).leaves)).wanted
        if wanted:
            self._grow(wanted)
        return bool(wanted)

    def place(self, state: State) -> Any:
        """Copies a state into the regions; returns the same structure, with tensors that lie there.

        Generators are the same objects. `state` itself stays as it is.

        Raises:
            ValidationError, ManifestError, NoMemoryError: as `refit`.
        """
        packed = pack(_now(state), self._arena, self._grow)
        if packed is None:
            raise ConflictError("there is no room for the state")
        return build(packed.document, self._arena, packed.generators)

    def restored(self) -> Any:
        """A new structure of the state that came with the world, with generators set to where they were.

        Raises:
            ValidationError: none came, or it can't be restored here.
        """
        if not self.world.host_state:
            raise ValidationError("the world came without a state", field="host_state")
        return build(fmt.decode(self.world.host_state), self._arena)

    def close(self) -> None:
        """Leaves the world at a boundary; see `World.close`."""
        self.world.close()

    def _pack(self, state: State) -> bytes:
        packed = pack(_now(state), self._arena, self._grow)
        if packed is None:
            raise ConflictError("there is no room for the state")
        return fmt.encode(packed.document)

    def _grow(self, wanted: dict[Any, int]) -> Arena:
        resize: dict[str, tuple[int, ...]] = {}
        add: list[Region] = []
        count = sum(is_spill(name) for name in self._arena.regions)
        rank = self.world.rank
        for device, nbytes in wanted.items():
            name = self._arena.spill(device)
            old = self._arena.regions[name].nbytes if name else 0
            size = max(2 * old, -(-nbytes // SPILL_STEP) * SPILL_STEP)
            if name:
                resize[name] = (size,)
            else:
                where = f"{prefix(rank)}{SPILL}{count + len(add)}"
                add.append(Region(where, "uint8", (size,), device=device_name(device), rank=rank))
        self.world.revise(add=add, resize=resize)
        self._arena = Arena(self.world.tensor, self.world.regions, rank)
        return self._arena


class TorchStandby:
    """A worker that waits for a session with a nested state; of `TorchWorker.standby`.

    Attributes:
        standby: underneath.
        state: the template's structure, with tensors at the addresses that they will have when a session
            arrives (for captured graphs); `None` without a template. Not to be written while waiting.
    """

    def __init__(
        self, standby: Standby, regions: tuple[Region, ...], rank: int, template: Any = None
    ) -> None:
        self.standby = standby
        self.state: Any = None
        if template is not None:
            packed = pack(template, Arena(standby.tensor, regions, rank), None)
            if packed is None:
                raise ValidationError("the template does not fit into the regions", field="regions")
            arena = Arena(standby.tensor, regions, rank)
            self.state = build(packed.document, arena, packed.generators)

    @property
    def id(self) -> str:
        """Of the standby on its node."""
        return self.standby.id

    def wait(self, timeout: float | None = None) -> TorchWorld | None:
        """Waits for a session; see `Standby.wait`.

        Returns:
            The world with its state restored; `None` after `timeout` seconds.

        Raises:
            ValidationError: its state can't be restored here; the world stays on the node, unattended.
        """
        world = self.standby.wait(timeout)
        if world is None:
            return None
        try:
            return TorchWorld(world)
        except ValidationError:
            world.close()
            raise

    def close(self) -> None:
        """Ends the standby; nothing once it holds a world."""
        self.standby.close()


def _now(state: State) -> Any:
    return state() if callable(state) else state
