"""One slot: the memory of a session or a standby on this node, with its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from worldmove.errors import ManifestError, ProtocolError
from worldmove.hosting.folio import Place as PagePlace
from worldmove.hosting.memory import Arenas, Holding, fresh_extents, retired, revised
from worldmove.hosting.pages import Pages
from worldmove.hosting.ranks import Change, Ranks
from worldmove.hosting.spare import Spare, SpareRecord
from worldmove.ipc import close_all
from worldmove.manifest import HOST, Extent, LeafMap, Manifest, Place
from worldmove.page.messages import Adopted, Revise, Welcome
from worldmove.sealing import unsealed


class LeafRecord(msgspec.Struct, frozen=True):
    """Which folio, and which bytes of it."""

    folio: str
    place: PagePlace


class SlotRecord(msgspec.Struct, frozen=True):
    """What the keeper holds beside the descriptors, so that a slot outlives its node.

    The first `pages` descriptors are control pages, the newest first; those of the extents follow, then those
    of the spare copy. The page in force may lie in a folio instead: `leaf` says in which, and where.
    """

    key: str
    id: str
    session_id: str | None
    bound: str | None
    seed: int
    pages: int
    fingerprint: dict[str, str]
    manifest: Manifest
    extents: tuple[Extent, ...]
    places: tuple[Place, ...]
    counted: tuple[bool, ...]
    secrets: tuple[str, ...]
    revisions: tuple[int, ...]
    spare: SpareRecord | None = None
    leaf: LeafRecord | None = None

    def __repr__(self) -> str:
        return f"SlotRecord(key={self.key!r}, id={self.id!r})"


class Slot:
    """A session or standby on this node.

    Attributes:
        key: the node's own name for this memory; never changes.
        id: of the session, or of the standby until it is adopted.
        session_id: `None` for a standby.
        bound: the move that this standby is promised to.
        seed: of the session's leaf digests.
        ranks: its workers.
        pages: the control page that they share with the node, and former ones.
        revisions: how many of each rank have been taken in.
        spare: the copy of its last snapshot, if it is to have one.
    """

    def __init__(
        self,
        *,
        key: str,
        slot_id: str,
        session_id: str | None,
        seed: int,
        fingerprint: Mapping[str, str],
        holding: Holding,
        pages: Pages,
        secrets: tuple[str, ...],
        revisions: Sequence[int] = (),
        adopted: Adopted | None = None,
        on_change: Callable[[Slot, Change], None],
        discard: Callable[[Sequence[int]], None],
    ) -> None:
        self.key = key
        self.id = slot_id
        self.session_id = session_id
        self.bound: str | None = None
        self.spare: Spare | None = None
        self.seed = seed
        self.fingerprint = dict(fingerprint)
        self.pages = pages
        self.secrets = secrets
        self.revisions = list(revisions or [0] * len(secrets))
        foreign = {r.rank for r in holding.manifest.regions if r.source.kind != "arena"}
        self.ranks = Ranks(
            pages, lambda change: on_change(self, change), foreign=frozenset(foreign), adopted=adopted
        )
        self._holding = holding
        self._pins = 0
        self._unused: list[int] = []
        self._on_change = on_change
        self._discard = discard

    def __repr__(self) -> str:
        kind = "standby" if self.session_id is None else "session"
        return f"<Slot {kind} {self.id!r} revision {self.manifest.revision}>"

    @property
    def all_fds(self) -> tuple[int, ...]:
        """Everything that the keeper holds, as `SlotRecord` says."""
        spare = self.spare.fds if self.spare is not None else ()
        return (*self.pages.fds, *self._holding.fds, *spare)

    @property
    def counted_bytes(self) -> int:
        """Bytes that the budget counts."""
        spare = self.spare.holding.counted_bytes if self.spare is not None else 0
        return self._holding.counted_bytes + spare

    def give_spare(self, spare: Spare | None, arenas: Arenas) -> None:
        """Another spare copy takes the place of the one that there is."""
        old, self.spare = self.spare, spare
        if old is not None:
            self._unused += old.close(arenas)
            self._sweep()

    @property
    def holding(self) -> Holding:
        """The memory as it is now; a consistent value that revisions do not change."""
        return self._holding

    @property
    def manifest(self) -> Manifest:
        """The regions as they are now."""
        return self._holding.manifest

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Allocations, in the order of `fds`."""
        return self._holding.extents

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each region lies."""
        return self._holding.places

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of the extents; valid until the slot closes, or a revision while it is not pinned."""
        return self._holding.fds

    @property
    def leaf_map(self) -> LeafMap:
        """Of the manifest as it is now."""
        return self._holding.leaf_map

    @property
    def kind(self) -> Literal["session", "standby"]:
        """What lies here."""
        return "standby" if self.session_id is None else "session"

    @property
    def vacant(self) -> bool:
        """A standby whose workers are all there and owe no sign of life, promised to nobody."""
        free = self.session_id is None and self.bound is None
        return free and self.ranks.state == "live" and not self.ranks.roll.silent

    def knows(self, rank: int, secret: str) -> bool:
        """Whether `secret` is that of a rank's welcome."""
        known = self.secrets[rank] if 0 <= rank < len(self.secrets) else ""
        return bool(known) and hmac.compare_digest(known.encode(), secret.encode())

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Holding]:
        """While inside, no descriptor of this slot is closed, whatever a revision or an end retires."""
        self._pins += 1
        try:
            yield self._holding
        finally:
            self._pins -= 1
            self._sweep()

    def revise(self, rank: int, revision: Revise, fds: Sequence[int], arenas: Arenas) -> None:
        """Takes in a rank's revision, once; `fds` belong to the slot from now on.

        Raises:
            ManifestError: it contradicts itself, the manifest, or what the descriptors are; they are closed.
            ProtocolError: one before it is missing.
        """
        if revision.number <= self.revisions[rank]:
            close_all(fds)
            return
        old = self._holding
        try:
            if revision.number != self.revisions[rank] + 1:
                raise ProtocolError(f"revision {revision.number} follows {self.revisions[rank]}")  # noqa: TRY301
            fresh = fresh_extents(rank, revision)
            _check_host(fds, fresh)
            new = revised(old, rank, revision, fds)
        except BaseException:
            close_all(fds)
            raise
        self._holding = new
        self.revisions[rank] = revision.number
        arenas.adopt(sum(_counted(extent) for extent in fresh))
        for fd, counted in retired(old, new):
            self._unused.append(fd)
            arenas.release(counted)
        unplaced = set(fds) - set(new.fds)
        for fd, extent in zip(fds, fresh, strict=True):
            if fd in unplaced:
                self._unused.append(fd)
                arenas.release(_counted(extent))
        self.ranks.page.revision = new.manifest.revision
        self._sweep()
        self._on_change(self, "revised")

    def became(self, session_id: str, session: Manifest, seed: int) -> None:
        """The standby holds `session_id` now: its seed, revision and times are those of the session."""
        self.id = self.session_id = session_id
        self.bound = None
        self.seed = seed
        mine = self._holding.manifest
        manifest = msgspec.structs.replace(
            mine,
            revision=session.revision,
            block_ms=session.block_ms,
            horizon_ms=session.horizon_ms,
            endpoint=mine.endpoint or session.endpoint,
            snapshot_every=session.snapshot_every,
        )
        self._holding = dataclasses.replace(self._holding, manifest=manifest)
        self.ranks.page.revision = manifest.revision

    def record(self) -> SlotRecord:
        """What the keeper needs to know."""
        holding, leaf = self._holding, self.pages.leaf
        return SlotRecord(
            key=self.key,
            id=self.id,
            session_id=self.session_id,
            bound=self.bound,
            seed=self.seed,
            pages=len(self.pages.fds),
            fingerprint=self.fingerprint,
            manifest=holding.manifest,
            extents=holding.extents,
            places=holding.places,
            counted=holding.counted,
            secrets=self.secrets,
            revisions=tuple(self.revisions),
            spare=self.spare.record if self.spare is not None else None,
            leaf=LeafRecord(leaf.folio.key, leaf.place) if leaf is not None else None,
        )

    def welcome(self, rank: int, extents: tuple[int, ...]) -> Welcome:
        """What a rank's worker is told; descriptors of `extents` come with it."""
        holding = self._holding
        return Welcome(
            slot=self.key,
            session_id=self.session_id,
            rank=rank,
            ranks=len(self.secrets),
            epoch=self.ranks.page.epoch,
            manifest=holding.manifest,
            places=holding.places,
            extents=extents,
            sizes=tuple(holding.extents[index].nbytes for index in extents),
            secret=self.secrets[rank],
            revisions=self.revisions[rank],
            fingerprint=self.fingerprint,
        )

    def close(self, arenas: Arenas) -> None:
        """Gives up this node's descriptors, once nothing pins them; the workers' own stay theirs."""
        self.give_spare(None, arenas)
        arenas.release(self._holding.counted_bytes)
        self._unused += self._holding.fds
        self._sweep()

    def _sweep(self) -> None:
        if self._pins == 0 and self._unused:
            self._discard(tuple(self._unused))
            self._unused.clear()


def _counted(extent: Extent) -> int:
    """Bytes of an extent that the budget counts: a GPU counts for itself."""
    return extent.nbytes if extent.device == HOST else 0


def _check_host(fds: Sequence[int], fresh: Sequence[Extent]) -> None:
    """Checks what a revision brings of host memory; the rest is checked on its GPU."""
    if len(fds) != len(fresh):
        raise ManifestError("a revision has not one descriptor for each extent", field="extents")
    here = [(fd, extent.nbytes) for fd, extent in zip(fds, fresh, strict=True) if extent.device == HOST]
    check_sealed([fd for fd, _ in here], [nbytes for _, nbytes in here])


def check_sealed(fds: Sequence[int], sizes: Sequence[int]) -> None:
    """Checks that a worker's memory can't shrink under those who map it.

    Raises:
        ManifestError: there is not one sealed memory file of at least its size for each of `sizes` (bytes).
    """
    if len(fds) != len(sizes):
        raise ManifestError("a revision has not one descriptor for each extent", field="extents")
    for fd, nbytes in zip(fds, sizes, strict=True):
        if (wrong := unsealed(fd, nbytes)) is not None:
            raise ManifestError(f"an extent of {nbytes} bytes {wrong}", field="extents")
