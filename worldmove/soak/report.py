"""What a soak found: the document, the table, and whether its claims hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from rich.table import Table

from worldmove.soak.plan import Step

Result = Literal["committed", "aborted", "rejected"]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One move as it went.

    Attributes:
        fired: whether its fault happened; false also for good moves.
        ms: from the request until everything was calm again.
    """

    step: Step
    result: Result
    code: str | None
    reason: str | None
    fired: bool
    ms: float


class ByFault(msgspec.Struct, kw_only=True):
    """How moves with one fault, or in one phase, or on one path went."""

    moves: int = 0
    fired: int = 0
    committed: int = 0
    aborted: int = 0
    rejected: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `worldmove soak --json`.

    Attributes:
        torn: blocks that differ from the twin's, or are missing.
        double_owned: blocks that were generated twice, worlds found in two places, and whatever else the
            history (`worldmove.soak.history`) says that must never be.
        leaked: kinds of things that a node had more of than before.
        lost: worlds that did not come back.
        worlds_replaced: worlds that a worker's death in mid-block had torn: nobody gets those.
        good: moves without a fault; good_committed: those of them that took place.
        blocks: how many were generated, and compared with the twin's byte by byte.
        by_fault: by what went wrong; by_phase: by where, as `SIDE.PHASE`; by_path: by the path that was asked
            for. All three count moves with a fault.
    """

    moves: int
    committed: int
    aborted: int
    rejected: int
    torn: int
    double_owned: int
    leaked: int
    lost: int
    good: int
    good_committed: int
    worlds_replaced: int
    blocks: int
    seed: int
    duration_s: float
    by_fault: dict[str, ByFault]
    by_phase: dict[str, ByFault]
    by_path: dict[str, ByFault] = {}

    @property
    def ok(self) -> bool:
        """Whether what a soak is for holds."""
        return not (self.torn or self.double_owned or self.leaked or self.lost)


def line(done: Done) -> str:
    """One move in one line."""
    step = done.step
    what = f"{step.fault} after {step.lead}" if step.lead else step.fault or "good"
    what += ", with its worker" if step.beside else ""
    idle = "" if done.fired or not step.fault else " (did not happen)"
    why = f" ({done.code}: {done.reason})" if done.code else ""
    return f"{step.number}: {what}{idle}, {step.path}: {done.result}{why}, {done.ms:.0f} ms"


def count(done: Sequence[Done], part: slice) -> dict[str, ByFault]:
    """Moves by a part of their fault's name, which is `SIDE.PHASE.WHAT`."""
    return _count(done, lambda step: ".".join(step.fault.partition("=")[0].split(".")[part]))


def count_paths(done: Sequence[Done]) -> dict[str, ByFault]:
    """Moves with a fault by their path."""
    return _count(done, lambda step: step.path)


def _count(done: Sequence[Done], named: Callable[[Step], str]) -> dict[str, ByFault]:
    found: dict[str, ByFault] = {}
    for move in done:
        if not move.step.fault:
            continue
        entry = found.setdefault(named(move.step), ByFault())
        entry.moves += 1
        entry.fired += move.fired
        setattr(entry, move.result, getattr(entry, move.result) + 1)
    return dict(sorted(found.items()))


def table(outcome: Outcome) -> Table:
    """By fault, then by phase."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    shown.add_column("what went wrong", no_wrap=True)
    for name in ("moves", "happened", "committed", "aborted", "rejected"):
        shown.add_column(name, justify="right", no_wrap=True)
    good = ByFault(
        moves=outcome.good, committed=outcome.good_committed, aborted=outcome.good - outcome.good_committed
    )
    for name, entry in {"nothing": good, **outcome.by_fault}.items():
        _row(shown, name, entry)
    shown.add_section()
    for name, entry in outcome.by_phase.items():
        _row(shown, f"in {name}", entry)
    shown.add_section()
    for name, entry in outcome.by_path.items():
        _row(shown, f"path {name}", entry)
    return shown


def _row(shown: Table, name: str, entry: ByFault) -> None:
    values = (entry.moves, entry.fired, entry.committed, entry.aborted, entry.rejected)
    shown.add_row(name, *(str(value) if value else "·" for value in values))


def verdict(outcome: Outcome) -> str:
    """One line: what holds, or what doesn't."""
    return (
        f"{outcome.moves} moves in {outcome.duration_s:.0f} s (seed {outcome.seed}): "
        f"{outcome.committed} committed, {outcome.aborted} aborted, {outcome.rejected} rejected; "
        f"{outcome.blocks} blocks compared; {outcome.torn} torn, {outcome.double_owned} double-owned, "
        f"{outcome.leaked} leaked, {outcome.lost} lost"
    )
