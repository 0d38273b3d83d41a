"""A session in its serving stack: tensors, blocks, and the boundary between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from worldmove.errors import (
    ConflictError,
    NotFoundError,
    ProtocolError,
    SessionEndedError,
    SessionMoved,
)
from worldmove.ipc import close_all
from worldmove.manifest import Manifest, Region
from worldmove.page.control import PAUSE_AT, PROGRESS, RankState
from worldmove.page.messages import Adopted, Advance, Bye, Ended, Message, Moved, Paused, Resume, Started
from worldmove.sdk.link import LOOK_S, Link, Standing
from worldmove.sdk.memory import RankMemory
from worldmove.sdk.revision import Change, make_revision

HostState = bytes | bytearray | memoryview | None
Buffer = (bytes, bytearray, memoryview)


def map_rank(link: Link, fds: Sequence[int], own: Mapping[str, Any] | None = None) -> RankMemory:
    """Maps a rank's extents but `own` regions, and is ready. Closes `fds`; on an error the link too."""
    welcome = link.welcome
    memory = RankMemory(own)
    try:
        extents = {
            index: (fd, size) for index, fd, size in zip(welcome.extents, fds, welcome.sizes, strict=True)
        }
        placed = [
            (region, place.extent, place.offset)
            for region, place in zip(welcome.manifest.regions, welcome.places, strict=True)
            if region.rank == welcome.rank
        ]
        memory.map(placed, extents)
        link.kept.memory = memory
        link.ready()
    except BaseException:
        link.close()
        raise
    finally:
        close_all(fds)
    return memory


class Standby:
    """A worker that waits to be handed a session; its memory is mapped already.

    Attributes:
        id: of the standby on its node.
        tickets: for the other ranks' processes, by `Worker.join_standby`.
    """

    def __init__(
        self,
        standby_id: str,
        link: Link,
        memory: RankMemory,
        tickets: tuple[str, ...],
        end: Callable[[], None],
    ) -> None:
        self.id = standby_id
        self.tickets = tickets
        self._link: Link | None = link
        self._memory = memory
        self._end = end

    def tensor(self, name: str, like: str | None = None) -> Any:
        """A region of this rank: the same address that it has when the session arrives."""
        return self._memory.view(name, like)

    def wait(self, timeout: float | None = None) -> World | None:
        """Waits for a session.

        Before a world is sent here, and before it is handed over, the node asks whether anybody is there, and
        only `wait` answers: call it again within the node's `peer_timeout_ms`, or the move is off.

        Args:
            timeout: seconds; `None` waits for ever, 0 looks whether one has come.

        Returns:
            The adopted world, which may generate at once; `None` after `timeout`.

        Raises:
            SessionEndedError: the standby was ended at the node.
            SessionMoved: it was adopted while its node was gone, and that world has moved on.
            NotFoundError: a node that started again does not know it: stand by anew.
        """
        link = self._link
        if link is None:
            raise ConflictError("this standby has ended or holds a world already")
        answer = link.ask(None, Standing(0, stopped=False, waiting=True), timeout)
        if answer is None:
            return None
        self._link = None
        if isinstance(answer, Ended):
            link.close()
            raise SessionEndedError(answer.reason)
        if isinstance(answer, Moved):
            link.close()
            raise SessionMoved(answer.destination, answer.endpoint)
        if not isinstance(answer, Adopted):
            link.close()
            raise ProtocolError(f"a standby was told {type(answer).__name__}")
        state = link.page.host_state(link.welcome.rank, answer.block)
        world = World(
            answer.session_id, answer.epoch, link, self._memory, block=answer.block, host_state=state
        )
        link.tell(Started())
        return world

    def close(self) -> None:
        """Ends the standby; nothing once it holds a world."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._memory.clear()
            self._end()


class _Block:
    """Context of one block; there is one for each world, since blocks do not nest."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None:
        self._world._begin()  # noqa: SLF001 - its own other half

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the mark in place: only the boundary makes the state consistent."""


class World:
    """One rank of a session.

    Attributes:
        id: of the session.
        epoch: of its ownership.
        host_state: what came with the world, empty for a new one.
        tickets: for the other ranks' processes, by `Worker.join`.
    """

    def __init__(
        self,
        session_id: str,
        epoch: int,
        link: Link,
        memory: RankMemory,
        *,
        block: int,
        host_state: bytes,
        tickets: tuple[str, ...] = (),
    ) -> None:
        self.id = session_id
        self.epoch = epoch
        self.host_state = host_state
        self.tickets = tickets
        self._link = link
        self._memory = memory
        self._rank = link.welcome.rank
        self._block = block
        self._open = True
        self._context = _Block(self)
        self._begun = False
        self._marks = True
        self._look_at = time.monotonic() + LOOK_S
        self._use_page()
        self._page.set_marks(self._rank, marks=True)
        self._page.set_state(self._rank, RankState.RUNNING)

    def _use_page(self) -> None:
        self._page = self._link.page
        self._words = self._page.words
        self._fence = self._page.fence
        self._progress = self._page.base(self._rank) + PROGRESS

    @property
    def rank(self) -> int:
        """Which part of the session this process holds."""
        return self._rank

    @property
    def block_number(self) -> int:
        """The last finished block."""
        return self._block

    @property
    def manifest(self) -> Manifest:
        """As this rank knows it: with its own revisions, not with those of other ranks."""
        return self._link.kept.manifest

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, for instance to stand by with the same ones elsewhere."""
        return self._link.kept.manifest.regions

    @property
    def closed(self) -> bool:
        """Whether the world is not this process's any more."""
        return not self._open

    def tensor(self, name: str, like: str | None = None) -> Any:
        """A region of this rank, to be written in place; its address stays.

        Args:
            name: of the region.
            like: `numpy` or `torch` for a region in host memory, `cupy` or `torch` for one on a GPU; if left
                out, a NumPy array, or an object with `__cuda_array_interface__`. Other libraries than torch
                see bf16 as uint16 and fp8 as uint8.

        Raises:
            NotFoundError: this rank has no such region.
            ValidationError: the library can't view it.
        """
        return self._memory.view(name, like)

    def block(self) -> _Block:
        """Context in which a block is generated: marks the state as being written.

        The mark stays until `boundary`. A worker that dies meanwhile leaves a torn world, which is refused
        to everybody; one that dies between `boundary` and the next `block` leaves a world to continue.
        """
        return self._context

    def _begin(self) -> None:
        self._check_open()
        self._begun = True
        self._words[self._progress] = self._block << 1 | 1

    def boundary(self, host_state: HostState | Callable[[], HostState] = None) -> None:
        """Ends a block. Returns at once unless a move wants the state; then when the world may go on.

        A world with regions on a GPU first waits until the GPU has done everything that this process gave
        it: a boundary that is published is one that memory has reached, whatever becomes of this process.

        Args:
            host_state: what belongs to the state and lies in no region: bytes, which are kept at each
                boundary, or a callable that is only asked when the state is wanted. With a callable the
                world can't be taken up by another worker if this one dies.

        Raises:
            SessionMoved: the world has gone to its new owner; this one is closed.
            SessionEndedError: the session was ended at the node; the world is closed.
            ManifestError: the host state is longer than `host_state_bytes`; the boundary did not happen.
            DeviceError: work on a GPU has failed; the boundary did not happen.
        """
        self._check_open()
        self._memory.synchronize()
        block = self._block + 1
        lazy = None
        if callable(host_state):
            lazy = host_state
        else:
            self._page.put_host_state(self._rank, block, host_state or b"")
        if self._marks and not self._begun:
            # It writes outside of block(): nothing can be said about its state between boundaries.
            self._marks = False
            self._page.set_marks(self._rank, marks=False)
        words = self._words
        words[self._progress] = block << 1
        self._block = block
        self._begun = False
        self._fence()
        if words[PAUSE_AT] <= block:
            self._stand(block, lazy)
        elif time.monotonic() >= self._look_at:
            self._look()

    def _stand(self, block: int, lazy: Callable[[], HostState] | None) -> None:
        """Stops at a boundary until the node says what becomes of the world."""
        if lazy is not None:
            self._page.put_host_state(self._rank, block, lazy() or b"")
            self._memory.synchronize()
        self._page.set_state(self._rank, RankState.STOPPED, now_ns=time.monotonic_ns())
        self.settle(Paused(block))

    def settle(self, message: Paused | None) -> None:
        """Waits, standing at the present block, for the node's word. Part of the SDK, not for stacks."""
        standing = Standing(self._block, stopped=True, waiting=False)
        try:
            answer = self._link.ask(message, standing)
        except NotFoundError as error:
            self._leave()
            raise SessionEndedError(
                f"the node does not hold this session any more: {error.message}"
            ) from error
        self._obey(answer)

    def _obey(self, answer: Message | None) -> None:
        """Does what the node says to a rank."""
        match answer:
            case Resume() | Advance():
                if self._link.page is not self._page:
                    self._use_page()
                self._page.set_state(self._rank, RankState.RUNNING)
                self._look_at = time.monotonic() + LOOK_S
            case Moved(destination=destination, endpoint=endpoint):
                self._leave()
                raise SessionMoved(destination, endpoint)
            case Ended(reason=reason):
                self._leave()
                raise SessionEndedError(reason)
            case _:
                self._leave()
                raise ProtocolError(f"a standing rank was told {type(answer).__name__}")

    def _look(self) -> None:
        if self._link.look(self._block):
            self._use_page()
        elif self._link.over is not None:
            # It has run on while its record went elsewhere, as only an operator can decide.
            self._obey(self._link.over)
        self._look_at = time.monotonic() + LOOK_S

    def revise(
        self,
        *,
        add: Iterable[Region | Mapping[str, Any]] = (),
        drop: Iterable[str] = (),
        resize: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Adds, drops or resizes regions of this rank, between two blocks. Waits for nobody.

        New memory is zero, and lies in host memory or on a GPU on which the session has regions already. A
        resized region stays on its device, keeps the common corner of its contents (the common prefix
        where the number of dimensions changes) and has another address: ask for its tensor again.

        Args:
            add: new regions, `Region` or mapping; their rank is this one's.
            drop: names.
            resize: new shape by name.

        Raises:
            ConflictError: called inside a block.
            ManifestError: the manifest would not be valid, or a region is not this rank's.
            NoMemoryError: the new memory does not fit; nothing has changed.
        """
        self._check_open()
        if self._begun:
            raise ConflictError("regions are revised at a boundary, not inside block()")
        change = Change(tuple(add), tuple(drop), dict(resize or {}))
        made = make_revision(self._link.kept.manifest, self._rank, self._memory, change)
        if made is None:
            return
        self._link.kept.manifest, revision, fds = made
        self._link.revise(revision, fds)

    def close(self) -> None:
        """Leaves the world at a boundary: it stays on its node, unattended, for another worker to take up.

        Inside a block it leaves a torn world. Tensors that are still referred to stay valid memory.
        """
        if not self._open:
            return
        if not self._page.writing(self._rank):
            self._page.set_state(self._rank, RankState.VACANT)
        self._link.tell(Bye())
        self._leave()

    def _leave(self) -> None:
        self._open = False
        self._link.close()
        self._memory.clear()

    def _check_open(self) -> None:
        if not self._open:
            raise ConflictError(f"world {self.id!r} is closed")
