"""What the demo found: the document, the table, the contact sheet, and whether its claims hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from PIL.Image import Image
from rich.table import Table
from rich.text import Text

from worldmove.demo import sheet
from worldmove.demo.film import Film
from worldmove.views import MigrationView

MIN_FRAMES_BETWEEN = 10


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One move, as `worldmove demo --json` tells it. Times in milliseconds; `rounds` with the final one."""

    state: str
    source: str = msgspec.field(name="from")
    destination: str = msgspec.field(name="to")
    rounds: int
    state_bytes: int
    sent_bytes: int
    pause_ms: float | None
    data_ms: float | None
    commit_ms: float | None
    resume_ms: float | None
    total_ms: float
    path: str | None
    source_root: str | None
    destination_root: str | None

    @classmethod
    def of(cls, view: MigrationView) -> Move:
        """From a move that has ended; one that got no receipt has no roots and no times."""
        receipt = view.receipt
        return cls(
            state=view.state,
            source=view.source,
            destination=view.destination,
            rounds=len(receipt.rounds) if receipt else 0,
            state_bytes=view.state_bytes,
            sent_bytes=receipt.sent_bytes if receipt else view.sent_bytes,
            pause_ms=receipt.pause_ms if receipt else None,
            data_ms=receipt.data_ms if receipt else None,
            commit_ms=receipt.commit_ms if receipt else None,
            resume_ms=receipt.resume_ms if receipt else None,
            total_ms=receipt.total_ms if receipt else view.elapsed_ms,
            path=receipt.path if receipt else view.path,
            source_root=receipt.source_root if receipt else None,
            destination_root=receipt.destination_root if receipt else None,
        )

    @property
    def moved(self) -> bool:
        """Whether the world has changed its node."""
        return self.state == "released"

    @property
    def exact(self) -> bool:
        """Whether both ends had the same root."""
        return self.source_root is not None and self.source_root == self.destination_root


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's document; what is equal is counted. States only of worlds that tell digests of theirs."""

    ok: bool
    frames_compared: int
    frames_equal: int
    moves: tuple[Move, ...]
    states_compared: int | msgspec.UnsetType = msgspec.UNSET
    states_equal: int | msgspec.UnsetType = msgspec.UNSET


def outcome(film: Film, moves: Sequence[Move], asked: int) -> tuple[Outcome, list[str]]:
    """Judges the demo.

    Args:
        film: everything that was shown, compared with the twin.
        moves: every move that was asked for.
        asked: how many there should be.

    Returns:
        The document, and in words whatever contradicts it being `ok`.
    """
    faults = [
        *_film_faults(film, sum(move.moved for move in moves)),
        *(f"move {n} ended as {move.state}" for n, move in enumerate(moves, 1) if not move.moved),
        *(f"move {n}: the roots differ" for n, move in enumerate(moves, 1) if move.moved and not move.exact),
    ]
    if len(moves) != asked:
        faults.append(f"{len(moves)} moves of {asked} took place")
    document = Outcome(
        ok=not faults,
        frames_compared=film.compared,
        frames_equal=film.equals,
        states_compared=len(film.states) or msgspec.UNSET,
        states_equal=film.states_equal if film.states else msgspec.UNSET,
        moves=tuple(moves),
    )
    return document, faults


def _film_faults(film: Film, moved: int) -> list[str]:
    faults = []
    if film.missing:
        faults.append(f"blocks {film.missing} are missing")
    if film.twice:
        faults.append(f"blocks {sorted(set(film.twice))} were generated twice")
    if film.compared != film.frames or not film.frames:
        faults.append(f"{film.compared} frames of {film.frames} were compared")
    if film.equals != film.compared:
        faults.append(f"{film.compared - film.equals} frames differ from the twin's")
    if film.states_equal != len(film.states):
        faults.append(f"{len(film.states) - film.states_equal} arrived states differ from the twin's")
    stays = film.stays()
    if len(stays) != moved + 1:
        faults.append(f"the film has {len(stays)} stays for {moved} moves")
    if any(last - first + 1 < MIN_FRAMES_BETWEEN for _, first, last in stays):
        faults.append(f"a stay has fewer than {MIN_FRAMES_BETWEEN} frames")
    return faults


def table(moves: Sequence[Move]) -> Table:
    """The moves as a table that fits a terminal of 80 columns."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("", "move", "state", "path"):
        shown.add_column(name, no_wrap=True)
    for name in ("rounds", "sent\nMB", "pause\nms", "data\nms", "commit\nms", "resume\nms", "total\nms"):
        shown.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    shown.add_column("root\nat both", no_wrap=True)
    for number, move in enumerate(moves, 1):
        times = (move.pause_ms, move.data_ms, move.commit_ms, move.resume_ms, move.total_ms)
        shown.add_row(
            str(number),
            f"{move.source}→{move.destination}",
            Text(move.state, style="green" if move.moved else "red"),
            move.path or "-",
            str(move.rounds),
            _mb(move.sent_bytes),
            *(_ms(value) for value in times),
            Text(_root(move)[:8], style="green" if move.exact else "red"),
        )
    return shown


def contact_sheet(film: Film, moves: Sequence[Move], verdict: str, good: bool) -> Image:
    """The film on one picture, with the moves marked."""
    stays = [
        sheet.Stay(
            node,
            first,
            last,
            [
                sheet.Picture(frame, film.picture(frame), film.equal(frame))
                for frame in sheet.pick(first, last)
            ],
        )
        for node, first, last in film.stays()
    ]
    moved = [(number, move) for number, move in enumerate(moves, 1) if move.moved]
    changes = [
        sheet.Change(f"move {number}   {move.source} to {move.destination}", _facts(move), move.exact)
        for number, move in moved
    ]
    size = _mb(moves[0].state_bytes) if moves else "?"
    times = "once" if len(moved) == 1 else f"{len(moved)} times"
    title = f"A world of {size} MB moved {times} between two nodes while it generated"
    return sheet.draw(title, verdict, stays, changes[: max(len(stays) - 1, 0)], good)


def verdict(found: Outcome, faults: Sequence[str]) -> str:
    """One line: what holds, or what doesn't."""
    equal = f"{found.frames_equal} of {found.frames_compared} frames equal the twin's bit for bit"
    if faults:
        return "; ".join([equal, *faults])
    return f"{equal}; no frame missing, none twice; every pair of roots equal"


def _facts(move: Move) -> list[str]:
    rounds = "1 round" if move.rounds == 1 else f"{move.rounds} rounds"
    return [
        f"pause {_ms(move.pause_ms)} ms",
        f"{_mb(move.sent_bytes)} MB sent in {rounds}",
        f"total {_ms(move.total_ms)} ms",
        f"path {move.path or '-'}",
        f"root {_root(move)}",
    ]


def _root(move: Move) -> str:
    if move.exact and move.source_root is not None:
        return move.source_root[:16]
    return "-" if move.source_root is None else "differs"


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
