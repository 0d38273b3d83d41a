"""Every check of any machine, in the order in which they are shown; those of GPUs follow (`doctor.gpu`)."""

from __future__ import annotations

from collections.abc import Callable

from worldmove.doctor import container, kernel, machine, ucx
from worldmove.doctor.finding import Finding

Check = Callable[[], Finding]

CHECKS: tuple[Check, ...] = (
    machine.python,
    machine.event_loop,
    ucx.ucx,
    ucx.fabric,
    machine.processors,
    machine.memory,
    machine.clock,
    machine.identity,
    machine.ledger_folder,
    container.surroundings,
    container.run_folder,
    container.shared_memory,
    container.locked_memory,
    container.device_binding,
    container.temporary_folder,
    kernel.memory_files,
    kernel.unix_sockets,
    kernel.processes,
    kernel.open_files,
    kernel.loopback,
)
