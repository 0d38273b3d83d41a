"""What the soak does, move by move: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from worldmove.faults.points import every_fault
from worldmove.views import PathChoice

GOOD_SHARE = 0.5
HOLDS_S = (0.4, 2.5)
"""How long a stopped process stands: less, and more, than the time that a silent peer is given."""
GIVING_UP = (
    *("source.finishing.cut", "source.finishing.starve", "source.pausing.cut", "source.verifying.cut"),
    *("destination.finishing.cut", "destination.finishing.starve", "destination.admitted.starve"),
    *("destination.prepared.cut", "destination.verifying.starve"),
)
LEADS = {
    "source.settling": GIVING_UP,
    "source.aborted": GIVING_UP,
    "destination.settling": GIVING_UP,
    "destination.aborted": GIVING_UP,
    "destination.reclaiming": ("destination.committed.ledger-refuse",),
    "source.reclaiming": ("destination.committed.cut", "destination.committed.delay=2500", ""),
}
"""Phases that no good move comes into: what has to go wrong first."""


class Step(NamedTuple):
    """One move.

    Attributes:
        number: from 1 on.
        world: index of the world that moves.
        hop: it goes so many nodes further than where it is.
        live: whether it copies before it pauses.
        path: how the bytes are to come.
        fault: name of what goes wrong; empty for a good move.
        lead: name of what has to go wrong before, so that it comes to the fault's phase; mostly empty.
        hold_s: how long what is stopped stands.
    """

    number: int
    world: int
    hop: int
    live: bool
    path: PathChoice
    fault: str
    lead: str
    hold_s: float


def steps(seed: int, nodes: int, worlds: int) -> Iterator[Step]:
    """All moves of a seed, without an end.

    About half of them are good ones. Faults are dealt from a shuffled deck of all that there are: none comes
    again before every other one has come.
    """
    chance = random.Random(seed)  # noqa: S311 - it is to be repeated, not to be secret
    deck: list[str] = []
    number = 0
    while True:
        number += 1
        fault = ""
        if chance.random() >= GOOD_SHARE:
            if not deck:
                deck = [one.name for one in every_fault()]
                chance.shuffle(deck)
            fault = deck.pop()
        lead = chance.choice(LEADS.get(fault.rpartition(".")[0], ("",)))
        lanes = "lane" in fault or "token" in fault
        yield Step(
            number=number,
            world=chance.randrange(worlds),
            hop=chance.randrange(1, nodes),
            live=chance.random() < (0.9 if ".copying." in fault else 0.6),
            path="staged" if lanes or chance.random() < 0.6 else "local",
            fault=fault,
            lead=lead,
            hold_s=chance.choice(HOLDS_S),
        )
