"""Admission at the destination: can this session come, where would it lie, and by which path?"""

from __future__ import annotations

from pathlib import Path as FilePath

import msgspec
import structlog

from worldmove import messages as m
from worldmove.config import Settings
from worldmove.errors import DeadlineError, NoWorkerError, SessionExistsError, ValidationError
from worldmove.hosting.host import Host
from worldmove.hosting.matching import RETRY_AFTER_MS
from worldmove.hosting.slots import Slot
from worldmove.manifest import Manifest, Source, validate
from worldmove.memory.limits import MOVE_DESCRIPTORS, check_descriptors
from worldmove.sessions import Berth, SessionBook
from worldmove.views import SessionSpec

log = structlog.get_logger(__name__)


class Admission:
    """Finds berths for sessions that come."""

    def __init__(self, settings: Settings, boot_id: str, host: Host, book: SessionBook) -> None:
        self._settings = settings
        self._boot_id = boot_id
        self._host = host
        self._book = book

    def check(self, hello: m.Hello) -> str:
        """Whether the session could come now; reserves nothing.

        Returns:
            The path's name.

        Raises:
            ManifestError: the manifest is malformed, or no standby matches it.
            NoMemoryError: too few descriptors are left here for one more move.
            FingerprintMismatchError: no standby would generate the same bits.
            NoWorkerError: nobody waits here.
            SessionExistsError: the session is on this node already.
            ValidationError: the wanted path leads nowhere.
        """
        validate(hello.manifest)
        check_descriptors(MOVE_DESCRIPTORS)
        # A fenced world of an earlier epoch counts, too: its record must not become this node's under it.
        if self._book.get(hello.session_id) is not None or hello.session_id in self._host.sessions:
            raise SessionExistsError(f"session {hello.session_id!r} is on this node already")
        path = self._path(hello)
        try:
            self._host.find_standby(hello.manifest, hello.fingerprint)
        except NoWorkerError as error:
            if not hello.allow_unattended:
                raise self._explained(error) from error
        return path

    async def admit(self, hello: m.Hello) -> Berth:
        """Reserves a berth; a standby's workers have all answered by then.

        One that does not answer is passed over, and is not vacant until it does.

        Raises:
            NoMemoryError: memory for an unattended session lacks.
            WorldMoveError: as `check`.
        """
        path = self.check(hello)
        while True:
            try:
                slot = self._host.find_standby(hello.manifest, hello.fingerprint)
            except NoWorkerError as error:
                if not hello.allow_unattended:
                    raise self._explained(error) from error
                break
            self._host.bind(slot, hello.move_id)
            if await self._answers(slot, hello.move_id):
                return Berth(slot, path, hello.move_id, self._book, bare=False)
        spec = SessionSpec(manifest=_arenas_only(hello.manifest), fingerprint=hello.fingerprint)
        slot, _tickets = await self._host.open_standby(spec)
        slot.bound = hello.move_id
        return Berth(slot, path, hello.move_id, self._book, bare=True)

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

    def _path(self, hello: m.Hello) -> str:
        wanted = hello.path if hello.path != "auto" else self._settings.path
        one_host = hello.boot_id == self._boot_id and hello.socket is not None
        near = one_host and FilePath(hello.socket or "").is_socket()
        if wanted == "local" and not near:
            raise ValidationError(
                "path 'local' needs both nodes on one host with a shared run_dir; allowed: auto, staged",
                field="path",
            )
        if wanted == "auto":
            wanted = "local" if near else "staged"
        return wanted


def _arenas_only(manifest: Manifest) -> Manifest:
    """The same regions, all in arenas of this node: memory that a stack brought along stays where it was."""
    regions = tuple(msgspec.structs.replace(region, source=Source()) for region in manifest.regions)
    return msgspec.structs.replace(manifest, regions=regions)
