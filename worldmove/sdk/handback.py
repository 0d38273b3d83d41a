"""Handing a rank back to a node that knows nothing of it: node and keeper had died, the worker has not."""

from __future__ import annotations

from worldmove.errors import ConflictError, DeadlineError, LedgerError, NotFoundError, WorldMoveError
from worldmove.ipc import SyncChannel
from worldmove.manifest import Manifest
from worldmove.page.control import ControlPage
from worldmove.page.messages import FDS_PER_MESSAGE, Handback, Memory, NodeMessage, Rejoin
from worldmove.sdk.memory import RankMemory


class Kept:
    """What a worker could hand back, and whether that is its turn to do so.

    Attributes:
        manifest: as this rank knows it, with its own revisions.
        memory: of this rank, once it is mapped.
        offering: whether the next node is offered the memory, instead of being asked for it.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.memory: RankMemory | None = None
        self.offering = False

    def unknown(self, page: ControlPage, code: str) -> bool:
        """After a refusal: whether the node knows nothing of this rank and is to be handed it back.

        It takes the memory of sessions, not that of standbys without one, and only what has a descriptor.
        """
        fresh = not self.offering and code == NotFoundError.code and self.memory is not None
        held = all(region.source.kind != "cuda-ipc" for region in self.manifest.regions)
        self.offering = fresh and held and page.session_id is not None
        return self.offering

    def refused(self, page: ControlPage, error: WorldMoveError) -> bool:
        """After a refusal of a rank that stands: whether to try again at once, the other way round.

        Raises:
            NotFoundError: the node will not take the memory.
            WorldMoveError: the refusal, which stands.
        """
        offered = self.offering
        if self.unknown(page, error.code):
            return True
        if offered and isinstance(error, ConflictError | LedgerError | DeadlineError):
            return False
        if page.session_id is None and isinstance(error, NotFoundError):
            raise NotFoundError(f"{error.message}: close this standby and register it anew") from error
        if offered:
            raise NotFoundError(f"the node did not take its memory back: {error.message}") from error
        raise error

    def hand_back(
        self,
        channel: SyncChannel[NodeMessage],
        rejoin: Rejoin,
        page: tuple[ControlPage, int],
        fingerprint: dict[str, str],
        revisions: int,
    ) -> None:
        """Sends everything that this rank holds; the answer is as that to a `Rejoin`.

        Args:
            channel: on which nothing has been said yet.
            rejoin: as it was refused.
            page: in force, and its descriptor.
            fingerprint: of the last welcome.
            revisions: how many of this rank are in the manifest.

        Raises:
            ConnectionLostError: the node has gone.
        """
        if self.memory is None:
            return
        names = [region.name for region in self.manifest.regions if region.rank == rejoin.rank]
        extents, places = self.memory.places(names)
        first = Handback(
            rejoin=rejoin,
            session_id=page[0].session_id or "",
            fingerprint=fingerprint,
            manifest=self.manifest,
            places=tuple(places),
            sizes=tuple(extent.nbytes for extent in extents),
            revisions=revisions,
        )
        channel.send(first, [page[1]])
        fds = [extent.fd for extent in extents]
        for start in range(0, len(fds), FDS_PER_MESSAGE):
            part = fds[start : start + FDS_PER_MESSAGE]
            channel.send(Memory(len(part)), part)
