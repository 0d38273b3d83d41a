"""Keeps a lane's sockets on one network device.

UCXX listens on all addresses and can't be told another, and UCX's TCP sockets know no authentication:
who reaches them can write into the lane's memory. So on a node that serves loopback only, they must not
be reachable from anywhere else either.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from worldmove.errors import TransportError

INTERNET = (socket.AF_INET, socket.AF_INET6)


def use_device(device: str) -> None:
    """Lets UCX use one device only; has to come before UCX is configured."""
    os.environ["UCX_NET_DEVICES"] = device


def confine(device: str) -> int:
    """Binds every listening socket of this process to a device: others' packets don't reach it.

    Returns:
        How many there are.

    Raises:
        TransportError: there is no such device, or the kernel (before 5.7) allows it to root only.
    """
    count = 0
    for sock in _listening():
        with sock:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
            except OSError as error:
                raise TransportError(f"lanes can't be kept on device {device!r}: {error}") from error
            count += 1
    return count


def _listening() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            # Not a socket, or the descriptor of this very listing.
            continue
        listens = sock.family in INTERNET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens:
            yield sock
        else:
            sock.close()
