"""What the soak does, move by move: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import NamedTuple

from worldmove.faults.points import LINGERING, WHATS, every_fault
from worldmove.views import PathChoice

GOOD_SHARE = 0.5
ONLY_GOOD_SHARE = 0.2
"""Where only some faults are wanted."""
DIRECT_SHARE = 0.5
"""Of the moves between nodes that have direct lanes."""
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
        beside: name of what goes wrong in the same moment; mostly empty.
    """

    number: int
    world: int
    hop: int
    live: bool
    path: PathChoice
    fault: str
    lead: str
    hold_s: float
    beside: str = ""


def steps(
    seed: int, nodes: int, worlds: int, only: Collection[str] = (), *, direct: bool = False
) -> Iterator[Step]:
    """All moves of a seed, without an end.

    About half of them are good ones; fewer, where only some faults are wanted. Faults are dealt from a
    shuffled deck of all that there are: none comes again before every other one has come. Every other time
    that a node is killed, its worker is too.

    Args:
        seed: of chance.
        nodes: how many.
        worlds: how many.
        only: what may go wrong, as the last part of faults' names says; everything, without it.
        direct: whether nodes have direct lanes; nothing but paths depends on it.
    """
    wanted = only or WHATS.keys() - LINGERING
    faults = [one.name for one in every_fault() if one.what in wanted]
    chance = random.Random(seed)  # noqa: S311 - it is to be repeated, not to be secret
    ways = random.Random(str(seed))  # noqa: S311 - as above; apart, so that nothing else hangs on it
    deck: list[str] = []
    number = 0
    while True:
        number += 1
        fault = ""
        if chance.random() >= (ONLY_GOOD_SHARE if only else GOOD_SHARE):
            if not deck:
                deck = list(faults)
                chance.shuffle(deck)
            fault = deck.pop()
        lead = chance.choice(LEADS.get(fault.rpartition(".")[0], ("",)))
        where, _, what = fault.rpartition(".")
        lanes = "lane" in fault or "token" in fault
        step = Step(
            number=number,
            world=chance.randrange(worlds),
            hop=chance.randrange(1, nodes),
            live=chance.random() < (0.9 if ".copying." in fault else 0.6),
            path="staged" if lanes or chance.random() < 0.6 else "local",
            fault=fault,
            lead=lead,
            beside=f"{where}.worker-kill" if what == "kill" and number % 2 else "",
            hold_s=chance.choice(HOLDS_S),
        )
        # One-time tokens that somebody can steal are those of staged lanes.
        straight = direct and "token" not in fault and ways.random() < DIRECT_SHARE
        yield step._replace(path="direct") if straight else step
