"""A small node without memory, lanes or ledger, to test the faces: HTTP, clients, command line.

It keeps what it is told and answers with it. An id `raise-CODE` (or a destination of that form) raises
the error with that code. Run as a program it serves itself:
`python faces_kit.py RUN_DIR READY_FD [OPTION=VALUE ...]`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from api.facade import PeerChannel
from api.serve import run
from worldmove import errors
from worldmove.config import Settings, load
from worldmove.errors import NotFoundError, NotOwnerError, SessionExistsError, WorldMoveError
from worldmove.views import (
    BoundaryView,
    DeviceView,
    DigestView,
    DryRun,
    GateView,
    LaneView,
    MigrationPage,
    MigrationRequest,
    MigrationView,
    NodeView,
    PeerNode,
    Receipt,
    Registration,
    Resolution,
    SessionEvent,
    SessionPage,
    SessionSpec,
    SessionView,
    Ticket,
)

SPEC: dict[str, Any] = {
    "model": "tiny",
    "regions": [{"name": "k", "dtype": "float32", "shape": [4, 8]}],
    "block_ms": 750,
    "horizon_ms": 250,
}


def kinds(base: type[WorldMoveError] = WorldMoveError) -> list[type[WorldMoveError]]:
    """Every error class."""
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


def settings(run_dir: Path, **given: object) -> Settings:
    """Settings that nothing of this machine's environment changes."""
    base = {"name": "A", "ledger": f"sqlite:///{run_dir}/l.db", "run_dir": run_dir, "http": "127.0.0.1:0"}
    return load(base | given, environ={})


def _fail(name: str) -> None:
    if name.startswith("raise-"):
        kind = next(kind for kind in kinds() if kind.code == name.removeprefix("raise-"))
        raise kind(f"asked to raise {name}", required_bytes=5, available_bytes=3, retry_after_ms=2500)
    if name == "bug":
        raise ZeroDivisionError("a secret detail")


class FakeNode:
    """See the module's docstring."""

    def __init__(self, settings: Settings, url: str) -> None:
        self.settings = settings
        self.name = settings.name
        self.url = url
        self.missing: list[str] = []
        self.specs: dict[str, SessionSpec] = {}
        self.standbys: dict[str, SessionSpec] = {}
        self.moves: dict[str, MigrationView] = {}
        self.keys: dict[str, str] = {}
        self.boundaries: list[tuple[str, int, int, bytes, float]] = []
        self.after_seq: int | None = None
        self.streams = 0
        self.closed = asyncio.Event()
        self.log: list[str] = []

    async def start(self) -> None:
        if "start-raises" in self.settings.faults:
            raise errors.LedgerError("the ledger is away")
        if "start-hangs" in self.settings.faults:
            sys.stderr.write("starting\n")
            await asyncio.Event().wait()
        self.log.append("start")

    async def close(self) -> None:
        self.log.append("close")
        if "close-hangs" in self.settings.faults:
            sys.stderr.write("closing\n")
            await asyncio.Event().wait()
        self.closed.set()

    async def abort(self) -> None:
        self.log.append("abort")

    async def ready(self) -> list[str]:
        return self.missing

    def _view(self, session_id: str, spec: SessionSpec) -> SessionView:
        return SessionView(
            id=session_id,
            model=spec.manifest.model,
            owner=self.name,
            owner_url=self.url,
            epoch=1,
            block=7,
            state="live",
            revision=1,
            bytes=spec.manifest.nbytes,
            ranks=len(spec.manifest.ranks),
            block_ms=spec.manifest.block_ms,
            horizon_ms=spec.manifest.horizon_ms,
        )

    def _find(self, session_id: str) -> SessionSpec:
        _fail(session_id)
        if session_id not in self.specs:
            raise NotFoundError(f"no session {session_id}", session_id=session_id)
        return self.specs[session_id]

    async def register(self, spec: SessionSpec) -> Registration:
        name = spec.id or f"s{len(self.specs)}"
        if name in self.specs:
            raise SessionExistsError(f"session {name} exists")
        self.specs[name] = spec
        tickets = tuple(Ticket(rank=rank, token=f"once-{rank}") for rank in spec.manifest.ranks)
        return Registration(id=name, epoch=1, socket=str(self.settings.socket_path), tickets=tickets)

    async def open_standby(self, spec: SessionSpec) -> Registration:
        name = f"standby-{len(self.standbys)}"
        self.standbys[name] = spec
        return Registration(id=name, epoch=0, socket=str(self.settings.socket_path), tickets=())

    async def drop_standby(self, standby_id: str) -> None:
        if self.standbys.pop(standby_id, None) is None:
            raise NotFoundError(f"no standby {standby_id}")

    async def sessions(self, after: str | None, limit: int) -> SessionPage:
        names = sorted(name for name in self.specs if after is None or name > after)
        page = tuple(self._view(name, self.specs[name]) for name in names[:limit])
        return SessionPage(sessions=page, next=page[-1].id if len(names) > limit else None)

    async def session(self, session_id: str) -> SessionView:
        return self._view(session_id, self._find(session_id))

    async def fenced(self) -> None:
        await asyncio.Event().wait()

    async def resolve_session(self, session_id: str, decision: Any) -> Resolution:
        view = await self.session(session_id)
        return Resolution(id=session_id, decision=decision, session=view if decision == "keep" else None)

    async def end_session(self, session_id: str) -> None:
        self._find(session_id)
        del self.specs[session_id]

    async def session_events(self, session_id: str, after_seq: int | None) -> AsyncIterator[SessionEvent]:
        self.after_seq = after_seq
        self.streams += 1
        try:
            async for event in self._session_events(session_id, after_seq):
                yield event
        finally:
            self.streams -= 1

    async def _session_events(self, session_id: str, after_seq: int | None) -> AsyncIterator[SessionEvent]:
        view = self._view(session_id, self._find(session_id))
        for seq in range((after_seq or 0) + 1, 4):
            yield SessionEvent(seq=seq, type="state", session=view)
        if session_id == "breaks":
            raise errors.LedgerError("the ledger is away", since_ms=5)
        if session_id == "quiet":
            await asyncio.Event().wait()

    async def digest(self, session_id: str) -> DigestView:
        self._find(session_id)
        return DigestView(
            session_id=session_id,
            epoch=1,
            block=7,
            seed=2**64 - 1,
            root="00" * 32,
            host_state=(),
            regions=(),
            held_ms=1.5,
        )

    async def boundary(
        self, session_id: str, rank: int, block: int, host_state: bytes, wait_ms: float
    ) -> BoundaryView:
        self._find(session_id)
        self.boundaries.append((session_id, rank, block, host_state, wait_ms))
        return BoundaryView(action="continue")

    async def attach(self, session_id: str, fingerprint: dict[str, str]) -> Registration:
        self._find(session_id)
        return Registration(id=session_id, epoch=2, socket="s", tickets=())

    async def migrate(self, request: MigrationRequest, idempotency_key: str | None) -> MigrationView:
        _fail(request.destination)
        self._find(request.session_id)
        if request.destination.startswith("owner-"):
            port = request.destination.removeprefix("owner-")
            if not self.url.endswith(f":{port}"):
                raise NotOwnerError("not mine", owner_url=f"http://127.0.0.1:{port}")
        if idempotency_key in self.keys:
            return self.moves[self.keys[idempotency_key]]
        move = MigrationView(
            id=f"m{len(self.moves)}",
            session_id=request.session_id,
            source=self.name,
            destination=request.destination,
            state="admitted",
            live=request.live,
            path="local",
            round=0,
            state_bytes=100,
            sent_bytes=0,
            created_at="2026-01-01T00:00:00Z",
            elapsed_ms=0.5,
        )
        self.moves[move.id] = move
        if idempotency_key:
            self.keys[idempotency_key] = move.id
        return move

    async def dry_run(self, request: MigrationRequest) -> DryRun:
        if request.destination == "full":
            return DryRun(
                admissible=False,
                code="no-memory",
                reason="no room",
                required={"bytes": 5.0},
                available={"bytes": 3.0},
            )
        return DryRun(admissible=True)

    async def migrations(self, after: str | None, limit: int) -> MigrationPage:
        moves = [move for move in reversed(self.moves.values()) if after is None or move.id < after]
        page = tuple(moves[:limit])
        return MigrationPage(migrations=page, next=page[-1].id if len(moves) > limit else None)

    async def migration(self, migration_id: str) -> MigrationView:
        _fail(migration_id)
        if migration_id not in self.moves:
            raise NotFoundError(f"no move {migration_id}")
        return self.moves[migration_id]

    async def migration_events(self, migration_id: str) -> AsyncIterator[MigrationView]:
        move = await self.migration(migration_id)
        final = "aborted" if move.destination == "nowhere" else "released"
        if move.destination == "vanishes":
            yield move
            return
        for round_, sent in enumerate((40, 90)):
            yield msgspec.structs.replace(move, state="copying", round=round_, sent_bytes=sent)
        done = msgspec.structs.replace(move, state=final, receipt=receipt(move, final))
        self.moves[migration_id] = done
        yield done

    async def cancel(self, migration_id: str) -> MigrationView:
        move = await self.migration(migration_id)
        self.moves[migration_id] = msgspec.structs.replace(move, state="aborted")
        return self.moves[migration_id]

    async def nodes(self) -> list[PeerNode]:
        return [PeerNode(name=self.name, incarnation=1, url=self.url, boot_id="b" * 36, alive=True)]

    async def view(self) -> NodeView:
        return NodeView(
            name=self.name,
            incarnation=1,
            version="0",
            url=self.url,
            boot_id="b" * 36,
            devices=(DeviceView(uuid="host", kind="host", name="cpu", total_bytes=10**9, free_bytes=10**8),),
            path_gbps={},
            gate=GateView(rate_bytes_per_s=None, outstanding_bytes=0, granted_bytes=0, waiting=0),
            lanes=(LaneView(pid=1, kind="tcp", port=2, migration_id=None),),
            executors=(3,),
            keeper=4,
            sessions=len(self.specs),
            standbys=(),
            migrations=len(self.moves),
        )

    def metrics(self) -> bytes:
        return b"worldmove_sessions 1.0\n"

    async def serve_peer(self, channel: PeerChannel) -> None:
        _fail(channel.move_id)
        if channel.move_id == "peer-bug":
            raise ZeroDivisionError("a secret detail")
        while True:
            message = await channel.receive()
            if message == b"close":
                return
            await channel.send(message + channel.move_id.encode())


def receipt(move: MigrationView, state: Any) -> Receipt:
    """A receipt of a move that went through one round."""
    return Receipt(
        migration_id=move.id,
        session_id=move.session_id,
        source=move.source,
        destination=move.destination,
        state=state,
        path="local",
        live=True,
        epoch=2,
        block=9,
        state_bytes=100,
        sent_bytes=90,
        kept_bytes=10,
        rounds=(),
        damaged=(),
        source_root="aa",
        destination_root="aa",
        pause_ms=1.0,
        data_ms=0.5,
        commit_ms=0.3,
        resume_ms=0.2,
        total_ms=5.0,
        missed=False,
        lanes=1,
        finished_at="2026-01-01T00:00:00Z",
    )


@contextmanager
def served(run_dir: Path, *options: str, ready: bool = True) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves a fake node through `api.serve.run`; yields its URL and the process."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, __file__, str(run_dir), str(write), *options],
        pass_fds=(write,),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(write)
    with os.fdopen(read) as pipe, process:
        try:
            yield pipe.readline().strip() if ready else "", process
        finally:
            process.kill()


def main(run_dir: str, ready_fd: str, *options: str) -> int:
    """Serves; the exit code is the server's."""
    chosen = dict(option.split("=", 1) for option in options)
    made = replace(settings(Path(run_dir), **chosen), log_level="debug")
    return run(made, int(ready_fd), FakeNode)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
