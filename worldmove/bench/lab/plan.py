"""What the laboratory is asked for, and what it finds."""

from __future__ import annotations

import msgspec

from worldmove.bench.lab.fan_in import FanIn
from worldmove.bench.lab.load import Row


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run.

    `horizon_ms` and `deadline_ms` are what every move asks for; `standbys` bounds how many are under way. For
    each number in `fan_in`, worlds of so many senders move at once, with the gate on and off.
    """

    senders: int = 4
    rate_bits_per_s: int = 50_000_000
    limit_bytes: int = 64 * 1024
    state_bytes: int = 2 << 20
    fan_in: tuple[int, ...] = ()
    fan_in_bytes: int = 4 << 20
    worlds: int = 8
    standbys: int = 24
    horizon_ms: float = 1000.0
    deadline_ms: float = 3000.0
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    seconds: float = 5.0
    seed: int = 7
    options: tuple[str, ...] = ()


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `alone_mbit_per_s`: verified moves of one sender after another."""

    plan: Plan
    alone_mbit_per_s: float
    start_s: float
    rows: tuple[Row, ...]
    fan_in: tuple[FanIn, ...] = ()
