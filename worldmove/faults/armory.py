"""Which faults are armed, and which have happened."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from worldmove.faults.points import Fault
from worldmove.machine import Role
from worldmove.protocol import State

REMEMBERED = 1000
log = structlog.get_logger(__name__)


class Armory:
    """The armed faults of one node.

    Attributes:
        fired: names of the faults that have happened, oldest first.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._armed = list(faults)
        self.fired: list[str] = []

    @property
    def armed(self) -> list[str]:
        """Names of what waits to happen."""
        return [fault.name for fault in self._armed]

    def arm(self, faults: Iterable[Fault]) -> None:
        """Adds faults."""
        self._armed.extend(faults)

    def disarm(self) -> None:
        """Takes all faults back, and forgets which have happened."""
        self._armed.clear()
        self.fired.clear()

    def take(self, side: Role, phase: State) -> list[Fault]:
        """What befalls a move that comes into `phase` on this side; it is not armed any more."""
        taken = [fault for fault in self._armed if (fault.side, fault.phase) == (side, phase)]
        self._armed = [fault for fault in self._armed if fault not in taken or fault.every]
        return taken

    def awaits(self, side: Role, phase: State) -> bool:
        """Whether something will befall a move that comes into `phase` on this side."""
        return any((fault.side, fault.phase) == (side, phase) for fault in self._armed)

    def note(self, fault: Fault, move_id: str) -> None:
        """A fault happens now."""
        log.warning("fault", fault=fault.name, move=move_id)
        self.fired.append(fault.name)
        del self.fired[:-REMEMBERED]
