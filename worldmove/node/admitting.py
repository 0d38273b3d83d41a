"""Admission at the destination: can this session come, where would it lie, and by which path?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path as FilePath

import structlog

from worldmove import directing
from worldmove import messages as m
from worldmove.cuda.ipc import pid_namespace
from worldmove.driver import Services
from worldmove.errors import (
    DeadlineError,
    NoWorkerError,
    SamePlaceError,
    SessionExistsError,
    ValidationError,
    WorldMoveError,
)
from worldmove.hosting.host import Host
from worldmove.hosting.matching import RETRY_AFTER_MS
from worldmove.hosting.memory import Holding
from worldmove.hosting.slots import Slot
from worldmove.manifest import HOST, validate
from worldmove.memory.limits import MOVE_DESCRIPTORS, check_descriptors
from worldmove.node.devices import Devices
from worldmove.placement import Wanted, changes, placed, travelled
from worldmove.sessions import Berth, SessionBook, Way
from worldmove.views import SessionSpec

log = structlog.get_logger(__name__)


class Admission:
    """Finds berths for sessions that come.

    Args:
        services, boot_id, host, book, devices: of the node.
        gone: waits, so many seconds at most, until a former stay of a session here is over.
    """

    def __init__(
        self,
        services: Services,
        boot_id: str,
        host: Host,
        book: SessionBook,
        devices: Devices,
        *,
        gone: Callable[[str, float], Awaitable[None]],
    ) -> None:
        self._services = services
        self._settings = services.settings
        self._intake = services.intake
        self._boot_id = boot_id
        self._host = host
        self._book = book
        self._devices = devices
        self._gone = gone
        self._berths: set[Berth] = set()

    async def look(self, hello: m.Hello) -> None:
        """Before `check`: has executors say which of the source's GPUs they can reach, where that matters."""
        sources = {region.device for region in hello.manifest.regions if region.device != HOST}
        if sources and self._choice(hello) in ("auto", "local") and self._near(hello):
            await self._services.reaches.ask(sources, time.monotonic())

    def check(self, hello: m.Hello) -> str:
        """Whether the session could come now; reserves nothing.

        Returns:
            The path's name.

        Raises:
            ManifestError: the manifest is malformed, or no standby matches it.
            NoMemoryError: too few descriptors are left here for one more move.
            FingerprintMismatchError: no standby would generate the same bits.
            NoWorkerError: nobody waits here.
            SessionExistsError: the session is on this node already, or its last stay here is not over.
            SamePlaceError: it would stay where it is.
            ValidationError: the wanted path leads nowhere, or a device is not here.
        """
        validate(hello.manifest)
        check_descriptors(MOVE_DESCRIPTORS, spare=0)
        wanted = self._wanted(hello)
        if not wanted.elsewhere:
            self._check_away(hello.session_id)
        standby = self._standby(hello, wanted)
        return self._way(hello, standby.holding if standby is not None else None).path

    async def admit(self, hello: m.Hello) -> Berth:
        """Reserves a berth and a share of the line; a standby's workers have all answered by then.

        One that does not answer is passed over, and is not vacant until it does. One that a failed move
        gives back is waited for.

        Raises:
            NoMemoryError: memory for an unattended session lacks.
            InadmissibleError, GateFullError: it could not finish in time; see `Intake.admit`.
            WorldMoveError: as `check`.
        """
        await self.look(hello)
        await self._gone(hello.session_id, self._settings.peer_timeout_ms / 1000)
        await self._returned(hello)  # last: a standby that is back may be gone again a moment later
        path, wanted = self.check(hello), self._wanted(hello)
        self._intake.admit(hello, path)
        try:
            return await self._reserve(hello, wanted)
        except BaseException:
            self._intake.over(hello.move_id)
            raise

    async def _reserve(self, hello: m.Hello, wanted: Wanted) -> Berth:
        while (waiting := self._standby(hello, wanted)) is not None:
            self._host.bind(waiting, hello.move_id)
            if await self._answers(waiting, hello.move_id):
                return self._berth(waiting, hello, bare=False)
        bare = placed(hello.manifest, wanted.devices)
        slot, _tickets = await self._host.open_standby(
            SessionSpec(manifest=bare, fingerprint=hello.fingerprint)
        )
        slot.bound = hello.move_id
        return self._berth(slot, hello, bare=True)

    def _berth(self, slot: Slot, hello: m.Hello, *, bare: bool) -> Berth:
        berth = Berth(slot, self._way(hello, slot.holding), hello, self._book, bare=bare)
        self._berths.add(berth)
        berth.over.add_done_callback(lambda _: self._berths.discard(berth))
        return berth

    async def _returned(self, hello: m.Hello) -> None:
        """Returns when a standby can take the session, or when none is about to come back from a failed move.

        Whoever is told that a move was aborted may ask for the next one at once; its standby is being wiped.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self._settings.peer_timeout_ms, hello.deadline_ms) / 1000):
                while not self._waits(hello):
                    coming = [berth.over for berth in self._berths if berth.returns_before(hello)]
                    if not coming:
                        return
                    await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)

    def _waits(self, hello: m.Hello) -> bool:
        try:
            self._host.find_standby(hello.manifest, hello.fingerprint, self._wanted(hello))
        except WorldMoveError:
            return False
        return True

    def _check_away(self, session_id: str) -> None:
        if self._book.get(session_id) is not None:
            raise SessionExistsError(f"session {session_id!r} is on this node already")
        # A fenced world of an earlier epoch counts, too: its record must not become this node's under it.
        if session_id in self._host.sessions:
            raise SessionExistsError(
                f"session {session_id!r} was on this node, which has started again and not yet let go: "
                "its worker has not come back, or its record does not settle it",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def _wanted(self, hello: m.Hello) -> Wanted:
        devices = {source: self._devices.named(name) for source, name in hello.devices.items()}
        return Wanted(devices, elsewhere=hello.source == self._settings.name)

    def _standby(self, hello: m.Hello, wanted: Wanted) -> Slot | None:
        """A standby that can take the session; `None` where memory without a worker will do."""
        try:
            return self._host.find_standby(hello.manifest, hello.fingerprint, wanted)
        except NoWorkerError as error:
            if not hello.allow_unattended:
                raise self._explained(error) from error
        bare = placed(hello.manifest, wanted.devices)
        if wanted.elsewhere and not changes(hello.manifest, bare):
            raise SamePlaceError(f"devices moves no region of {hello.session_id!r} to another GPU")
        for device in bare.gpus:
            self._devices.executors.of(device)
        return None

    async def _answers(self, slot: Slot, move_id: str) -> bool:
        """Whether a bound standby's workers are there; else the promise is taken back."""
        try:
            await slot.ranks.roll.ask(self._settings.peer_timeout_ms / 1000)
        except (DeadlineError, NoWorkerError) as error:
            log.warning("standby does not answer", standby=slot.id, reason=error.message)
            self._host.unbind(slot, move_id)
            return False
        except BaseException:
            self._host.unbind(slot, move_id)
            raise
        return True

    def _explained(self, error: NoWorkerError) -> NoWorkerError:
        """Nobody waits: says so of those, too, that are connected and give no sign of life."""
        silent = {
            slot.id: sorted(slot.ranks.roll.silent)
            for slot in self._host.standbys.values()
            if slot.ranks.roll.silent
        }
        if not silent:
            return error
        ranks = "; ".join(f"{name}: ranks {numbers}" for name, numbers in silent.items())
        return NoWorkerError(
            f"the standbys on this node give no sign of life ({ranks})",
            required=1,
            available=0,
            silent=silent,
            retry_after_ms=RETRY_AFTER_MS,
        )

    def _choice(self, hello: m.Hello) -> str:
        return hello.path if hello.path != "auto" else self._settings.path

    def _near(self, hello: m.Hello) -> bool:
        """Whether the source's descriptors can come here."""
        one_host = hello.boot_id == self._boot_id and hello.socket is not None
        # Descriptors travel between PID namespaces, handles of CUDA do not.
        spaces = {r.source.pid_namespace for r in hello.manifest.regions if r.source.kind == "cuda-ipc"}
        one_host = one_host and spaces <= {pid_namespace()}
        return one_host and FilePath(hello.socket or "").is_socket()

    def _way(self, hello: m.Hello, memory: Holding | None) -> Way:
        """How the bytes come, and whether staged lanes are wanted in case that fails.

        Without `memory` to which they go nothing is known of its devices but what the move asks for.
        """
        wanted, near, reaches = self._choice(hello), self._near(hello), self._services.reaches
        there = placed(hello.manifest, self._wanted(hello).devices) if memory is None else memory.manifest
        pairs = travelled(hello.manifest, there)
        apart = reaches.why_not(pairs, time.monotonic()) if near else ""
        if wanted == "local" and not near:
            raise ValidationError(
                "path 'local' needs both nodes on one host with a shared run_dir; allowed: auto, staged",
                field="path",
            )
        if wanted == "local" and apart:
            raise ValidationError(f"path 'local' cannot be had: {apart}; allowed: auto, staged", field="path")
        direct = hello.direct and (
            memory is None or directing.fits(hello.manifest, memory, self._services.direct)
        )
        if wanted == "direct" and not direct:
            raise ValidationError(
                "path 'direct' needs all regions on GPUs of both nodes, those of one GPU all on one other; "
                "allowed: auto, staged",
                field="path",
            )
        if wanted != "auto":
            return Way(wanted)
        if near and not apart:
            return Way("local", in_case=not reaches.proven(pairs))
        return self._far(hello, apart, direct=direct and memory is not None)

    def _far(self, hello: m.Hello, reason: str, *, direct: bool) -> Way:
        """The better of the ways between hosts: what is not known of one is measured when it is opened.

        Staged lanes are wanted, too, also where it is known: what fails before the pause shall cost no move.
        """
        known = self._services.direct_rates.of(hello.source, time.monotonic())
        if not direct or (known is not None and known < directing.floor(self._settings)):
            return Way("staged", reason=reason)
        return Way("direct", in_case=True, reason=reason)
