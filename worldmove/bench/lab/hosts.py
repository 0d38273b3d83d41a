"""Hosts on one machine: network namespaces on two bridges, one of whose ports is narrow and shallow.

    host 1 ─ data ─┐                      ┌─ mgmt ─ every host
    host 2 ─ data ─┼─ bridge ─▼─ data ─ host 0     the laboratory itself
    host n ─ data ─┘     tbf: rate, burst, limit

Bytes of sessions cross the bridge `data`, whose port towards host 0 lets `rate` through and holds `limit`
bytes, as the shallow buffer of a switch does. Segmentation offload is off at every end, so that the kernel's
packets are those of a wire. What the nodes say to each other and to the laboratory takes a network of its
own, as in a data centre with a management network, so that its losses are not mistaken for those of the
moves.

Everything is made by `ip`, `tc` and `ethtool` inside the namespaces of this process, which `enclosure` has
started: when it ends, however it ends, the kernel takes all of it down.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from worldmove.errors import ConfigError

DATA = "data"
MANAGEMENT = "mgmt"
NAMES = Path("/run/netns")
_DATA_NET = "10.77.0"
_MANAGEMENT_NET = "10.78.0"
MOST_HOSTS = 200
CONGESTION = "cubic"
_OFFLOADS = ("tso", "off", "gso", "off", "gro", "off")


class Port(NamedTuple):
    """The port towards host 0, as tc-tbf(8) takes it: bit/s, and bytes at once and in the queue."""

    rate_bits_per_s: int
    burst_bytes: int = 64 * 1024
    limit_bytes: int = 64 * 1024

    def arguments(self) -> list[str]:
        """After `tc qdisc replace dev DEVICE root`."""
        return [
            "tbf",
            *("rate", f"{self.rate_bits_per_s}bit"),
            *("burst", str(self.burst_bytes)),
            *("limit", str(self.limit_bytes)),
        ]


class LabHost(NamedTuple):
    """One host: run things there with `prefix` before the command."""

    number: int

    @property
    def address(self) -> str:
        """Where its node is reached: on the management network."""
        return f"{_MANAGEMENT_NET}.{self.number + 1}"

    @property
    def prefix(self) -> list[str]:
        """Runs the command that follows on this host, with its own /sys, where UCX looks for devices."""
        return ["ip", "netns", "exec", _name(self.number)]


def build(count: int, port: Port) -> list[LabHost]:
    """Makes `count` hosts; needs to be root in a network and a mount namespace of its own.

    Raises:
        ConfigError: too many hosts, or a command of iproute2 or ethtool failed or is missing.
    """
    if not 2 <= count <= MOST_HOSTS:
        raise ConfigError(f"a laboratory has 2 to {MOST_HOSTS} hosts, not {count}", option="senders")
    _run("mount", "-t", "tmpfs", "none", "/run")
    NAMES.mkdir()
    _run("ip", "link", "set", "lo", "up")
    for bridge in (DATA, MANAGEMENT):
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
    _run("ip", "address", "add", f"{_MANAGEMENT_NET}.254/24", "dev", MANAGEMENT)
    hosts = [LabHost(number) for number in range(count)]
    for host in hosts:
        _plug_in(host)
    narrow(port)
    return hosts


def narrow(port: Port) -> None:
    """Gives the port towards host 0 another rate or buffer.

    Raises:
        ConfigError: `tc` refuses it.
    """
    _run("tc", "qdisc", "replace", "dev", f"{DATA}0", "root", *port.arguments())


def _plug_in(host: LabHost) -> None:
    name = _name(host.number)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    for bridge, net in ((DATA, _DATA_NET), (MANAGEMENT, _MANAGEMENT_NET)):
        near = f"{bridge}{host.number}"
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", bridge, "netns", name)
        _run("ip", "link", "set", near, "master", bridge, "up")
        _run("ip", "-n", name, "address", "add", f"{net}.{host.number + 1}/24", "dev", bridge)
        _run("ip", "-n", name, "link", "set", bridge, "up")
    _run("ethtool", "-K", f"{DATA}{host.number}", *_OFFLOADS)
    _run(*host.prefix, "ethtool", "-K", DATA, *_OFFLOADS)
    # By the route, since the system's default can't be changed from inside a namespace.
    _run("ip", "-n", name, "route", "replace", f"{_DATA_NET}.0/24", "dev", DATA, "congctl", CONGESTION)


def _name(number: int) -> str:
    return f"host{number}"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} is not installed; on Debian or Ubuntu: apt-get install iproute2 ethtool"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)} failed: {error.stderr.strip() or error.stdout}") from error


def packets_dropped() -> int:
    """How many packets the port towards host 0 has dropped so far.

    Raises:
        ConfigError: `tc` does not say.
    """
    shown = subprocess.run(
        ["tc", "-s", "qdisc", "show", "dev", f"{DATA}0"], check=True, capture_output=True, text=True
    ).stdout
    words: Sequence[str] = shown.replace(",", "").split()
    try:
        return int(words[words.index("(dropped") + 1])
    except (ValueError, IndexError) as error:
        raise ConfigError(f"tc shows no dropped packets: {shown!r}") from error
