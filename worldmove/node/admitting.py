"""Admission at the destination: can this session come, where would it lie, and by which path?"""

from __future__ import annotations

from pathlib import Path as FilePath

import msgspec

from worldmove import messages as m
from worldmove.config import Settings
from worldmove.errors import NoWorkerError, SessionExistsError, ValidationError
from worldmove.hosting.host import Host
from worldmove.manifest import Manifest, Source, validate
from worldmove.sessions import Berth, SessionBook
from worldmove.views import SessionSpec


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
            FingerprintMismatchError: no standby would generate the same bits.
            NoWorkerError: nobody waits here.
            SessionExistsError: the session is on this node already.
            ValidationError: the wanted path leads nowhere.
        """
        validate(hello.manifest)
        if self._book.get(hello.session_id) is not None:
            raise SessionExistsError(f"session {hello.session_id!r} is on this node already")
        path = self._path(hello)
        try:
            self._host.find_standby(hello.manifest, hello.fingerprint)
        except NoWorkerError:
            if not hello.allow_unattended:
                raise
        return path

    async def admit(self, hello: m.Hello) -> Berth:
        """Reserves a berth; raises as `check`, and NoMemoryError where memory for an unattended one lacks."""
        path = self.check(hello)
        try:
            slot = self._host.find_standby(hello.manifest, hello.fingerprint)
        except NoWorkerError:
            spec = SessionSpec(manifest=_arenas_only(hello.manifest), fingerprint=hello.fingerprint)
            slot, _tickets = await self._host.open_standby(spec)
            slot.bound = hello.move_id
            return Berth(slot, path, hello.move_id, self._book, bare=True)
        self._host.bind(slot, hello.move_id)
        return Berth(slot, path, hello.move_id, self._book, bare=False)

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
        if wanted == "staged" and any(region.device != "host" for region in hello.manifest.regions):
            raise ValidationError(
                "path 'staged' carries host memory only, and regions of the session lie on a GPU; "
                "allowed: local, between nodes of one host",
                field="path",
            )
        return wanted


def _arenas_only(manifest: Manifest) -> Manifest:
    """The same regions, all in arenas of this node: memory that a stack brought along stays where it was."""
    regions = tuple(msgspec.structs.replace(region, source=Source()) for region in manifest.regions)
    return msgspec.structs.replace(manifest, regions=regions)
