"""The table of faults: what can go wrong, on which side of a move, in which of its phases.

A fault is written `SIDE.PHASE.WHAT`, with `=MS` where it takes a time, such as
`destination.verifying.ledger-late=800`. It befalls the next move that comes into that phase on that side,
once; with `every:` in front, each one. Phases are the states of `worldmove.protocol`; a fault takes effect
when the phase begins, before anything is done in it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from worldmove.errors import ConfigError
from worldmove.executor.faults import PREFIX
from worldmove.faults.lies import LIES, SENT
from worldmove.machine import Role
from worldmove.protocol import State
from worldmove.transport.faults import PREFIXES

ARM = "arm"
"""The name that arms nothing: the node only listens for names that come later."""
EVERY = "every:"
MAX_MS = 600_000


class Kind(StrEnum):
    """Who makes a fault happen."""

    PROCESS = "process"
    WORK = "work"
    CHANNEL = "channel"
    LEDGER = "ledger"
    LANE = "lane"


class What(NamedTuple):
    """One thing that can go wrong.

    Attributes:
        kind: who makes it happen.
        text: what happens, for the documentation.
        ms: the time that it takes unless told otherwise; `None` where it takes none.
    """

    kind: Kind
    text: str
    ms: int | None = None


WHATS: dict[str, What] = {
    "kill": What(Kind.PROCESS, "SIGKILL of the node"),
    "stop": What(Kind.PROCESS, "SIGSTOP of the node, until somebody sends SIGCONT"),
    "worker-kill": What(Kind.PROCESS, "SIGKILL of every rank's worker on this side"),
    "worker-stop": What(Kind.PROCESS, "SIGSTOP of every rank's worker on this side"),
    "executor-kill": What(Kind.PROCESS, "SIGKILL of the node's executors"),
    "executor-stop": What(Kind.PROCESS, "SIGSTOP of the node's executors"),
    "lane-kill": What(Kind.PROCESS, "SIGKILL of the move's lanes on this side"),
    "lane-stop": What(Kind.PROCESS, "SIGSTOP of the move's lanes on this side"),
    "keeper-kill": What(Kind.PROCESS, "SIGKILL of the node's keeper"),
    "delay": What(Kind.WORK, "the first thing done in the phase begins later", 300),
    "starve": What(Kind.WORK, "there is no memory for what is done in the phase"),
    "cut": What(Kind.CHANNEL, "the control connection is closed"),
    "mute": What(Kind.CHANNEL, "the control connection carries nothing, and is lost after the peer's time"),
    "drop": What(Kind.CHANNEL, "the next message to the peer never arrives"),
    "twice": What(Kind.CHANNEL, "the next message to the peer arrives twice"),
    "garble": What(Kind.CHANNEL, "the next message to the peer is noise"),
    "lie-digest": What(Kind.CHANNEL, "a leaf's digest is wrong"),
    "lie-root": What(Kind.CHANNEL, "a root is wrong"),
    "lie-length": What(Kind.CHANNEL, "a number of bytes or leaves is wrong"),
    "lie-epoch": What(Kind.CHANNEL, "an epoch is wrong"),
    "lie-session": What(Kind.CHANNEL, "another session is named"),
    "lie-round": What(Kind.CHANNEL, "another round is named"),
    "lie-state": What(Kind.CHANNEL, "a rank's host state is wrong"),
    "lie-token": What(Kind.CHANNEL, "a one-time token is wrong"),
    "lie-version": What(Kind.CHANNEL, "the message is of another version of the protocol"),
    "steal-token": What(Kind.CHANNEL, "somebody else uses a one-time token first"),
    "ledger-refuse": What(Kind.LEDGER, "the move's next call fails, and nothing was written"),
    "ledger-lost": What(Kind.LEDGER, "the move's next call is performed, and its reply lost"),
    "ledger-late": What(Kind.LEDGER, "the move's next call is performed later", 600),
    "ledger-orphan": What(Kind.LEDGER, "the move's next call fails at once, and is performed later", 600),
    "ledger-twice": What(Kind.LEDGER, "the move's next call is performed, and once more later", 600),
    "ledger-down": What(Kind.LEDGER, "every call of this node fails for a while", 1500),
    "lane-flip-once": What(Kind.LANE, "a byte of the first chunk of the move's first lane is flipped"),
    "lane-flip-always": What(Kind.LANE, "a byte of each chunk is flipped"),
    "lane-short-once": What(Kind.LANE, "the first chunk is shorter than what was asked for"),
    "lane-over-once": What(Kind.LANE, "the first chunk is longer than what was asked for"),
    "lane-stall": What(Kind.LANE, "nothing is sent after the first chunk"),
    "lane-unasked-once": What(Kind.LANE, "bytes that nobody pulled follow the first chunk"),
    "lane-drip": What(Kind.LANE, "chunks come late, though soon enough for the lane's own deadline"),
}
LINGERING = ("lane-drip",)
"""After these the destination may find the path slow, and refuse moves for a while: no deck has them."""

_S: Role = "source"
_D: Role = "destination"
PHASES: dict[Role, tuple[State, ...]] = {
    _S: tuple(state for state in State if state is not State.REJECTED),
    _D: tuple(state for state in State if state not in (State.REJECTED, State.PAUSING)),
}
"""Phases that a side can come into."""
_STARVABLE: dict[Role, tuple[State, ...]] = {
    _S: (State.ADMITTED, State.COPYING, State.FINISHING),
    _D: (State.REQUESTED, State.ADMITTED, State.COPYING, State.FINISHING, State.VERIFYING),
}
_LEDGER: dict[Role, tuple[State, ...]] = {
    _S: (State.ADMITTED, State.SETTLING, State.RECLAIMING, State.RELEASED, State.ABORTED),
    _D: (
        *(State.ADMITTED, State.VERIFYING, State.COMMITTED),
        *(State.RELEASED, State.SETTLING, State.RECLAIMING),
    ),
}
_TALKING = (State.REJECTED, State.ABORTED, State.RELEASED)
_IDLE: tuple[tuple[Role, State], ...] = ((_S, State.PREPARED), (_S, State.COMMITTED))


class Fault(NamedTuple):
    """One armed fault; `every` ones stay armed."""

    side: Role
    phase: State
    what: str
    ms: int
    every: bool = False

    @property
    def name(self) -> str:
        """As it is written."""
        time = "" if WHATS[self.what].ms is None else f"={self.ms}"
        return f"{EVERY if self.every else ''}{self.side}.{self.phase}.{self.what}{time}"

    @property
    def kind(self) -> Kind:
        """Who makes it happen."""
        return WHATS[self.what].kind


def possible(side: Role, phase: State, what: str) -> bool:
    """Whether this can happen in this phase of that side."""
    if phase not in PHASES[side]:
        return False
    if what in LIES or what in ("drop", "twice", "garble", "lie-version"):
        return any(what not in LIES or kind in LIES[what] for kind in SENT[side].get(phase, ()))
    special: dict[str, Callable[[], bool]] = {
        "starve": lambda: phase in _STARVABLE[side],
        "steal-token": lambda: side == _S and phase is State.ADMITTED,
        "cut": lambda: phase not in _TALKING,
        "mute": lambda: phase not in _TALKING,
        "delay": lambda: phase not in _TALKING and (side, phase) not in _IDLE,
    }
    if what in special:
        return special[what]()
    kind = WHATS[what].kind
    if kind is Kind.LANE:
        return side == _S and phase is State.ADMITTED
    return kind is not Kind.LEDGER or what == "ledger-down" or phase in _LEDGER[side]


def every_fault() -> tuple[Fault, ...]:
    """All faults that there are, each with its usual time."""
    return tuple(
        Fault(side, phase, what, about.ms or 0)
        for side in PHASES
        for phase in PHASES[side]
        for what, about in WHATS.items()
        if possible(side, phase, what)
    )


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a comma list; `arm`, and the names of lanes' and executors' own faults, pass by.

    Raises:
        ConfigError: a name is unknown, or can't happen in that phase.
    """
    names = [part.strip() for part in text.split(",")]
    return tuple(
        _parse(name) for name in names if name and name != ARM and not name.startswith((*PREFIXES, PREFIX))
    )


def _parse(name: str) -> Fault:
    point, _, time = name.removeprefix(EVERY).partition("=")
    parts: list[str] = point.split(".")
    if len(parts) != 3 or parts[0] not in PHASES or parts[1] not in set(State) or parts[2] not in WHATS:
        raise _unknown(name, "SIDE.PHASE.WHAT with a side, a phase and a fault of docs/faults.md is allowed")
    side: Role = _S if parts[0] == _S else _D
    phase, what = State(parts[1]), parts[2]
    if not possible(side, phase, what):
        raise _unknown(name, f"this can't happen in phase {phase} of the {side}")
    ms = WHATS[what].ms
    if time and (ms is None or not time.isdecimal() or not 0 < int(time) <= MAX_MS):
        raise _unknown(name, f"a time of 1 to {MAX_MS} ms is allowed where the fault takes one")
    return Fault(side, phase, what, int(time) if time else ms or 0, name.startswith(EVERY))


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(f"faults names {name!r}; {why}", option="faults", value=name)
