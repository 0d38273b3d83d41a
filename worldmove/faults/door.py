"""Where faults are armed while a node runs: a Unix socket in its private folder, and nowhere else.

One JSON object a line, answered by one:

    {"arm": "source.copying.kill,destination.verifying.ledger-lost"}  ->  {"armed": [...], "fired": [...]}
    {"disarm": true}, {}                                              ->  the same
    a name that is unknown                                            ->  {"error": "..."}
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from worldmove.errors import ConfigError
from worldmove.faults.armory import Armory
from worldmove.faults.points import parse

SOCKET = "faults.sock"
MAX_LINE = 64 * 1024
IDLE_S = 10.0


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of the door; all of it may be left out."""

    arm: str = ""
    disarm: bool = False


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is armed and what has happened, or why not."""

    armed: list[str] = []
    fired: list[str] = []
    error: str = ""


class FaultDoor:
    """Listens at `path` until it is closed."""

    def __init__(self, path: Path, armory: Armory) -> None:
        self._path = path
        self._armory = armory
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens; whatever lies at the path is replaced.

        Raises:
            ConfigError: the socket can't be made.
        """
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._visit, self._path, limit=MAX_LINE)
            self._path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"no socket at {self._path}: {error}", option="run_dir") from error

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(IDLE_S):
                line = await reader.readline()
            writer.write(msgspec.json.encode(self._obey(line)) + b"\n")
            await writer.drain()
        writer.close()

    def _obey(self, line: bytes) -> Answer:
        try:
            order = msgspec.json.decode(line, type=Order)
            faults = parse(order.arm)
        except (msgspec.MsgspecError, ConfigError) as error:
            return Answer(error=str(error))
        if order.disarm:
            self._armory.disarm()
        self._armory.arm(faults)
        return Answer(armed=self._armory.armed, fired=list(self._armory.fired))


async def order(run_dir: Path, *, arm: str = "", disarm: bool = False) -> Answer:
    """Tells the node whose folder this is what is to go wrong, and asks what has.

    Raises:
        ConfigError: a name is unknown.
        OSError: nobody listens there.
    """
    reader, writer = await asyncio.open_unix_connection(run_dir / SOCKET, limit=1 << 20)
    try:
        writer.write(msgspec.json.encode(Order(arm, disarm)) + b"\n")
        await writer.drain()
        answer = msgspec.json.decode(await reader.readline(), type=Answer)
    finally:
        writer.close()
    if answer.error:
        raise ConfigError(answer.error, option="faults", value=arm)
    return answer
