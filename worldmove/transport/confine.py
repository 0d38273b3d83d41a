"""Keeps a lane's sockets on one network device.

UCXX listens on all addresses and can't be told another, and UCX's TCP sockets know no authentication:
who reaches them can write into the lane's memory. So on a node that serves loopback only, they must not
be reachable from anywhere else either.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from worldmove.errors import TransportError

INTERNET = (socket.AF_INET, socket.AF_INET6)
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24s")


def use_device(device: str) -> None:
    """Lets UCX use one device only; has to come before UCX is configured."""
    os.environ["UCX_NET_DEVICES"] = device


def device_address(device: str) -> str:
    """The IPv4 address of a network device, dotted (netdevice(7)): where lanes kept on it are reached.

    Raises:
        TransportError: there is no such device, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, _IFREQ.pack(os.fsencode(device), b""))
        except OSError as error:
            raise TransportError(f"device {device!r} has no IPv4 address for lanes: {error}") from error
    # A sockaddr_in: family and port stand before the address.
    return socket.inet_ntoa(_IFREQ.unpack(answer)[1][4:8])


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
