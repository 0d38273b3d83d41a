"""What `Ranks` is made of: seats, one rank's place in a pause, and the pause itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from worldmove.page.messages import Adopted, Answer, Ended, Moved

Change = Literal["attached", "lost", "revised", "started", "left"]
RanksState = Literal["live", "paused", "unattended", "fenced", "moved", "ended"]


class Seat(Protocol):
    """The worker of one rank, as `Ranks` reaches it. No call waits or raises."""

    @property
    def pid(self) -> int:
        """Of the worker's process; 0 where it is not known."""

    def answer(self, message: Answer | Adopted) -> None:
        """Passes a message on; a worker that is gone is found elsewhere."""

    def ping(self, number: int) -> None:
        """Asks for a sign of life, which `RollCall.heard` is told."""

    def close(self) -> None:
        """Ends the connection: another worker has taken the rank, or the node goes."""


@dataclass(slots=True, eq=False)
class RankSeat:
    """Where one rank is.

    Attributes:
        number: of the rank.
        seat: its worker, if there is one.
        stopped: the block at which it stands and waits for an answer.
        waiting: it is a standby's and has not heard of an adoption.
        started: its serving stack has its adopted world in hand.
        away: it has not come back since the node started again.
    """

    number: int
    seat: Seat | None = None
    stopped: int | None = None
    waiting: bool = False
    started: bool = False
    away: bool = False


class Pauser(Protocol):
    """Who ends a pause (`Ranks`)."""

    held: Pause | None

    def end_pause(self, pause: Pause) -> None:
        """Ends `pause` if it is the one in force."""

    def finish(self, answer: Moved | Ended) -> None:
        """Ends the session here."""


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of a session stand at one boundary, until `resume` or `moved`; either ends the pause.

    Attributes:
        block: the boundary; 0 before the first block.
        host_states: one for each rank, as its worker gave it with this block.
        stopped_at: `time.monotonic()` when the last rank stopped.
        attended: whether workers stand there; an unattended session stands at its last boundary anyway.
    """

    block: int
    host_states: tuple[bytes, ...] = field(repr=False)
    stopped_at: float
    attended: bool
    _ranks: Pauser = field(repr=False)

    @property
    def held(self) -> bool:
        """Whether this pause is still in force."""
        return self._ranks.held is self

    def resume(self) -> None:
        """Lets the ranks generate on; nothing if the pause has ended already."""
        self._ranks.end_pause(self)

    def moved(self, destination: str, endpoint: str | None) -> None:
        """Tells the ranks that the session has gone; nothing if the pause has ended already."""
        if self.held:
            self._ranks.finish(Moved(destination, endpoint))
