"""Every check, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable

from worldmove.doctor import kernel, machine
from worldmove.doctor.finding import Finding

Check = Callable[[], Finding]

CHECKS: tuple[Check, ...] = (
    machine.python,
    machine.event_loop,
    machine.ucx,
    machine.processors,
    machine.memory,
    machine.clock,
    machine.identity,
    machine.gpu,
    machine.ledger_folder,
    kernel.memory_files,
    kernel.unix_sockets,
    kernel.processes,
    kernel.open_files,
    kernel.loopback,
    kernel.shared_memory,
)
