"""Which processors lie near to a device, on machines with several NUMA nodes; and memory near to them.

Read from sysfs (the kernel's documentation: ABI/stable/sysfs-devices-node and ABI/testing/sysfs-bus-pci).
Where the machine has one node, or says nothing, nothing is near and all is as usual.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def near(bus_id: str, root: Path = Path("/")) -> tuple[int, ...]:
    """The processors near to a PCI device that this process may use; empty: no difference is known.

    Args:
        bus_id: `domain:bus:device.function`, as the driver names it.
        root: where `/sys` is found (another place only in tests).
    """
    system = root / "sys"
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((system / f"bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
        nodes = _numbers((system / "devices/system/node/online").read_text())
        if node not in nodes or len(nodes) < 2:
            return ()
        cpus = _numbers((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return ()
    return tuple(sorted(cpus & os.sched_getaffinity(0)))


def stay_near(bus_id: str) -> None:
    """Keeps this thread, and those that it starts, on the processors near to a PCI device, where any are."""
    cpus = near(bus_id)
    if cpus:
        os.sched_setaffinity(0, cpus)


def _numbers(text: str) -> set[int]:
    """`0-3,8` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


@contextlib.contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """Keeps this thread on these processors: pages that it touches first lie near to them. Empty: on any."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)
