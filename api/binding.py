"""The node's port: bound, or a refusal that says who has it and what to do about it."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worldmove.config import Settings
from worldmove.errors import ConfigError

BACKLOG = 1024
PROC = Path("/proc")
LISTENING = "0A"
"""A listening socket's state in /proc/net/tcp, proc(5)."""


class Holder(NamedTuple):
    """A process that listens at a port; `stopped`: it stands still (SIGSTOP, a debugger, a frozen cgroup)."""

    pid: int
    name: str
    stopped: bool


def bind(settings: Settings) -> socket.socket:
    """A listening socket at the node's address, not blocking.

    Never with SO_REUSEPORT: connections would be dealt out to both processes, and a frozen one never answers.

    Raises:
        ConfigError: the address can't be had.
    """
    host, port = settings.http
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unbound(settings, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _unbound(settings, error) from error
    listener.setblocking(False)
    return listener


def _unbound(settings: Settings, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        why = f"port {settings.http[1]} is taken: {_who(settings.http[1])}"
    else:
        why = f"{error.strerror}; a free address of this host is allowed, or port 0"
    return ConfigError(
        f"http is {settings.http} and can't be bound: {why}", option="http", value=str(settings.http)
    )


def _who(port: int) -> str:
    """Who has a port, and the ways out."""
    other = "serve at another port (--http HOST:0 takes a free one; peers find it in the ledger)"
    holder = find_holder(port)
    if holder is None:
        return (
            "another process listens there, maybe one of another user or a former node that stands still. "
            f"Find it with `ss -ltnp 'sport = :{port}'` and end it, or {other}"
        )
    who = f"process {holder.pid} ({holder.name}) listens there"
    if holder.stopped:
        return (
            f"{who}, and stands still: it keeps the port until it is gone. If it is this node's former "
            f"process, `kill -KILL {holder.pid}` costs no world, since the keeper holds them all; or {other}"
        )
    return f"{who}. End it, or {other}"


def find_holder(port: int) -> Holder | None:
    """The process that listens at a TCP port of this network namespace, as far as /proc lets us see it."""
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    for entry in PROC.glob("[1-9]*") if wanted else ():
        # Processes come and go, and those of others don't show their descriptors.
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in wanted for fd in (entry / "fd").iterdir()):
                status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines())
                return Holder(int(entry.name), status["Name"], _stands(entry, status["State"]))
    return None


def _stands(entry: Path, state: str) -> bool:
    if state[:1] in "Tt":
        return True
    with contextlib.suppress(OSError):
        for line in (entry / "cgroup").read_text().splitlines():
            folder = line.removeprefix("0::/")
            frozen = Path("/sys/fs/cgroup") / folder / "cgroup.events"
            if folder != line and "frozen 1" in frozen.read_text():
                return True
    return False


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
