"""What is simulated: a fleet, its lines, what steps of a move take, which moves are asked for.

It is read from TOML. Every table and key of the file is a class and an attribute here; times are in
milliseconds, rates are written as `10Gbit`, sizes as `6GB` or `64KiB`. docs/simulator.md explains them, with
examples in docs/scenarios.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from worldmove.errors import ConfigError
from worldmove.quantities import parse_rate, parse_size

MOST_NODES = 100_000
MOST_MOVES = 10_000_000
MOST_LOADS = 64
GRANTS_NODES = 64
"""Up to so many nodes every single grant is simulated, unless told otherwise; above, rates are."""

Model = Literal["auto", "grants", "rates"]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the scenario's tables: unknown keys are refused."""


class Line(Table, frozen=True, kw_only=True):
    """A node's way in.

    Attributes:
        rate: what it carries.
        rtt_ms: from a grant to its first byte, at least.
        fan_in: pairs of senders that answer at once and the share of `rate` that is left then, measured in
            the laboratory; between them lines, after the last one a constant.
    """

    rate: str = "10Gbit"
    rtt_ms: float = 0.2
    fan_in: tuple[tuple[int, float], ...] = ((1, 1.0),)

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes per second."""
        return parse_rate(self.rate)

    def share(self, senders: int) -> float:
        """What is left of the rate when so many senders answer at once."""
        points = self.fan_in
        if senders <= points[0][0]:
            return points[0][1]
        for (low, here), (high, there) in itertools.pairwise(points):
            if senders <= high:
                return here + (there - here) * (senders - low) / (high - low)
        return points[-1][1]


class Costs(Table, frozen=True, kw_only=True):
    """What the steps of a move take beside the wire.

    Attributes:
        open_ms: from admission until the path is open.
        commit_ms: the ledger's record.
        resume_ms: until the standby may generate.
        source_digest: rate at which a source reads a state, as `100Gbit`.
        destination_digest: the same for the read-back.
        spread: by which share single times are longer or shorter at most, evenly spread.
    """

    open_ms: float = 50.0
    commit_ms: float = 3.0
    resume_ms: float = 3.0
    source_digest: str = "100Gbit"
    destination_digest: str = "100Gbit"
    spread: float = 0.1


class Gate(Table, frozen=True, kw_only=True):
    """The receivers' gates.

    Attributes:
        on: off, everybody answers at once, and nothing is rejected (only with single grants).
        batch: of one grant at most.
        under_way: grants that a move has out at once.
    """

    on: bool = True
    batch: str = "4MiB"
    under_way: int = 2


class Moves(Table, frozen=True, kw_only=True):
    """Which moves are asked for.

    Attributes:
        loads: bytes asked for a second by what all receivers carry; one run for each.
        seconds: for how long.
        state: sizes, each as likely as the next.
        live: the state is copied while the world generates.
        dirty: share of the state that a block rewrites.
        block_ms: of the worlds.
        horizon_ms: how long a world may stand.
        deadline_ms: of a move.
        arrivals: `poisson`, `even`, or `burst` (ten at a time).
        into: `one` receiver (the first node), or `all` nodes, drawn at random.
    """

    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seconds: float = 60.0
    state: tuple[str, ...] = ("6GB",)
    live: bool = True
    dirty: float = 0.15
    block_ms: float = 750.0
    horizon_ms: float = 1000.0
    deadline_ms: float = 60_000.0
    arrivals: Literal["poisson", "even", "burst"] = "poisson"
    into: Literal["one", "all"] = "all"

    @property
    def sizes(self) -> tuple[int, ...]:
        """State sizes in bytes."""
        return tuple(parse_size(each) for each in self.state)


class Scenario(Table, frozen=True, kw_only=True):
    """A scenario. `nodes` all have the same line; `model`: single grants, or rates."""

    name: str
    nodes: int = 2
    seed: int = 1
    model: Model = "auto"
    line: Line = Line()
    costs: Costs = Costs()
    gate: Gate = Gate()
    moves: Moves = Moves()

    @property
    def by_grants(self) -> bool:
        """Whether single grants are simulated."""
        return self.model == "grants" or (self.model == "auto" and self.nodes <= GRANTS_NODES)

    @property
    def receivers(self) -> int:
        """How many nodes take moves in."""
        return 1 if self.moves.into == "one" else self.nodes


def read(file: Path) -> Scenario:
    """The scenario in a TOML file.

    Raises:
        ConfigError: there is none, it is no TOML, or a value is not allowed; the message names the key.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}", option="file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}", option="file") from error
    return parse({"name": file.stem, **document})


def parse(document: Mapping[str, Any]) -> Scenario:
    """The scenario that a document describes; raises as `read`."""
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the scenario is wrong: {error}", option="file") from error
    for key, value, allowed, holds in _checks(scenario):
        if not holds:
            raise ConfigError(f"{key} is {value!r}; {allowed} is allowed", option=key)
    return scenario


def _checks(s: Scenario) -> list[tuple[str, object, str, bool]]:
    """Key, value, what is allowed, and whether it holds."""
    moves, costs = s.moves, s.costs
    senders = [number for number, _ in s.line.fan_in]
    found: list[tuple[str, object, str, bool]] = [
        ("nodes", s.nodes, f"2 to {MOST_NODES}", 2 <= s.nodes <= MOST_NODES),
        ("moves.loads", moves.loads, f"1 to {MOST_LOADS} numbers above 0, 100 at most", _loads(moves.loads)),
        ("moves.seconds", moves.seconds, "above 0, up to 1000000", 0 < moves.seconds <= 1e6),
        ("moves.dirty", moves.dirty, "0 to 1", 0 <= moves.dirty <= 1),
        ("moves.block_ms", moves.block_ms, "above 0", 0 < moves.block_ms < 1e9),
        ("moves.horizon_ms", moves.horizon_ms, "above 0", 0 < moves.horizon_ms < 1e9),
        ("moves.deadline_ms", moves.deadline_ms, "above 0", 0 < moves.deadline_ms < 1e9),
        ("costs.spread", costs.spread, "0 to 0.9", 0 <= costs.spread <= 0.9),
        ("gate.under_way", s.gate.under_way, "1 to 64", 1 <= s.gate.under_way <= 64),
        ("line.rtt_ms", s.line.rtt_ms, "0 to 10000", 0 <= s.line.rtt_ms <= 10_000),
        ("moves.state", moves.state, "at least one size", bool(moves.state)),
        (
            "line.fan_in",
            s.line.fan_in,
            "pairs [senders, share], senders from 1 growing, shares above 0 up to 1",
            bool(senders)
            and senders == sorted(set(senders))
            and senders[0] >= 1
            and all(0 < share <= 1 for _, share in s.line.fan_in),
        ),
        ("gate.on", s.gate.on, "true where rates are simulated", s.gate.on or s.by_grants),
    ]
    for key in ("open_ms", "commit_ms", "resume_ms"):
        value = getattr(costs, key)
        found.append((f"costs.{key}", value, "0 to 1000000", 0 <= value <= 1e6))
    rates = [("line.rate", s.line.rate), ("costs.source_digest", costs.source_digest)]
    rates.append(("costs.destination_digest", costs.destination_digest))
    found += [(key, text, "a rate such as 10Gbit", _reads(parse_rate, text)) for key, text in rates]
    sizes = [("gate.batch", s.gate.batch), *(("moves.state", each) for each in moves.state)]
    found += [(key, text, "a size such as 6GB", _reads(parse_size, text)) for key, text in sizes]
    return found


def _loads(loads: tuple[float, ...]) -> bool:
    return 0 < len(loads) <= MOST_LOADS and all(0 < load <= 100 for load in loads)


def _reads(parser: Any, text: str) -> bool:
    try:
        parser(text)
    except ValueError:
        return False
    return True
