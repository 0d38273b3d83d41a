"""`worldmove bench gate`: real nodes behind a shallow port, offered up to four times what it carries.

    python -m worldmove.bench.lab.gate PLAN

runs inside the laboratory's own namespaces, PLAN being the settings as JSON; `run` starts it there. First one
sender moves worlds alone, one after the other: what the port carries of verified moves. Then, load by load,
all senders together.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from worldmove.bench.lab import enclosure, hosts
from worldmove.bench.lab.fan_in import fan_in
from worldmove.bench.lab.load import Outcome, Row, Terms, offer, summary
from worldmove.bench.lab.plan import GateResult, Plan
from worldmove.bench.lab.stage import RECEIVER, Stage, staged
from worldmove.bench.report import Line, at_least, show
from worldmove.bench.stats import median
from worldmove.errors import ProcessLostError
from worldmove.views import MigrationRequest

GOODPUT_BAR = 0.9
ALONE_MOVES = 6
WARM_UP_MOVES = 2
WARM_UP_BURST = 12


def run(
    *,
    senders: int = 4,
    seconds: float = 5.0,
    rate_mbit: float = 50.0,
    loads: Sequence[float] = Plan().loads,
    json: bool = False,
) -> int:
    """Measures and shows.

    Args:
        senders: hosts that moves come from.
        seconds: for which each load is offered.
        rate_mbit: of the port, Mbit/s.
        loads: bytes asked for, by what one sender alone brings.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if no move that was taken on was late, torn or aborted.

    Raises:
        ConfigError: namespaces can't be made here.
    """
    plan = Plan(
        senders=senders, seconds=seconds, rate_bits_per_s=int(rate_mbit * 1e6), loads=tuple(map(float, loads))
    )
    words = [msgspec.json.encode(plan).decode(), *(["--json"] if json else [])]
    return enclosure.run("worldmove.bench.lab.gate", words)


async def measure(plan: Plan) -> GateResult:
    """Builds the laboratory, and offers one load after the other.

    Raises:
        ConfigError: the laboratory can't be built.
        WorldMoveError: a node failed.
    """
    began = time.monotonic()
    port = hosts.Port(plan.rate_bits_per_s, limit_bytes=plan.limit_bytes)
    made = hosts.build(plan.senders + 1, port)
    async with staged(made, plan.state_bytes, plan.worlds, plan.standbys, plan.options) as stage:
        start_s = time.monotonic() - began
        await warm_up(stage)
        alone = await alone_rate(stage)
        rows = [await _row(stage, plan, load, alone) for load in plan.loads]
    counts = list(plan.fan_in)
    crowds = [
        each
        for gate in ("on", "off")
        if counts
        for each in await fan_in(made, plan.fan_in_bytes, counts, gate)
    ]
    return GateResult(
        plan=plan,
        alone_mbit_per_s=alone * 8 / 1e6,
        start_s=start_s,
        rows=tuple(rows),
        fan_in=tuple(crowds),
    )


async def warm_up(stage: Stage) -> None:
    """Some worlds of every sender move at the same time, without haste: lanes start, rates get measured.

    Raises:
        ProcessLostError: a move did not take place.
    """

    async def one(sender: str, world: str) -> None:
        request = MigrationRequest(
            session_id=world, destination=RECEIVER, live=False, horizon_ms=60_000.0, deadline_ms=600_000.0
        )
        client = stage.clients[sender]
        move = await client.wait((await client.migrate(request)).id)
        if move.state != "released":
            raise ProcessLostError(f"{world} could not be moved to warm up: {move.code}, {move.reason}")

    each = max(1, WARM_UP_BURST // len(stage.senders))
    found = [(sender, stage.crowds[sender].take()) for sender in stage.senders for _ in range(each)]
    worlds = [(sender, world) for sender, world in found if world is not None][:WARM_UP_BURST]
    async with asyncio.TaskGroup() as group:
        for sender, world in worlds:
            group.create_task(one(sender, world))


async def alone_rate(stage: Stage) -> float:
    """Bytes a second of verified moves of one sender, one after another: the median of their pauses' data.

    Raises:
        ProcessLostError: a move did not take place.
    """
    rates = []
    for number in range(WARM_UP_MOVES + ALONE_MOVES):
        sender = stage.senders[0]
        await stage.crowds[sender].wait_for(1)
        await stage.crowds[RECEIVER].wait_for(1)
        world = stage.crowds[sender].take() or ""
        request = MigrationRequest(session_id=world, destination=RECEIVER, live=False, horizon_ms=60_000.0)
        client = stage.clients[sender]
        move = await client.wait((await client.migrate(request)).id)
        if move.receipt is None or not move.receipt.data_ms:
            raise ProcessLostError(f"a sender alone could not move its world: {move.code}, {move.reason}")
        if number >= WARM_UP_MOVES:
            rates.append(move.receipt.sent_bytes / (move.receipt.data_ms / 1000))
    return median(rates)


async def _row(stage: Stage, plan: Plan, load: float, alone: float) -> Row:
    for name, crowd in stage.crowds.items():
        await crowd.wait_for(plan.standbys if name == RECEIVER else plan.worlds)
    every_s = plan.state_bytes / (load * alone)
    dropped = hosts.packets_dropped()
    outcomes: list[Outcome] = await offer(
        stage, every_s, plan.seconds, Terms(plan.horizon_ms, plan.deadline_ms), plan.seed
    )
    # The first moves find an idle line: what counts begins when one of them could be over.
    window = (min(2 * every_s + plan.state_bytes / alone, plan.seconds / 2), plan.seconds)
    return summary(outcomes, load, window, alone, hosts.packets_dropped() - dropped)


def main(arguments: Sequence[str]) -> int:
    """Measures inside the laboratory's namespaces and shows; the exit code."""
    plan = msgspec.json.decode(arguments[0], type=Plan)
    folder = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
    if folder is not None:  # before minutes of measuring, not after them
        folder.mkdir(parents=True, exist_ok=True)
    result = uvloop.run(measure(plan))
    lines = [Line("one sender alone", f"{result.alone_mbit_per_s:.0f} Mb/s")]
    for row in result.rows:
        shown = (
            f"{row.admitted} of {row.asked} taken on, {row.missed} missed, goodput {row.goodput_ratio:.2f}, "
            f"pause p99 {row.p99_pause_ms:.0f} ms"
        )
        bar = at_least(row.goodput_ratio, GOODPUT_BAR) if row.offered_load >= 1 else ""
        lines.append(Line(f"load {row.offered_load:g}", shown, bar))
    for crowd in result.fan_in:
        shown = f"{crowd.goodput_mbit_per_s:.0f} Mb/s, {crowd.goodput_ratio:.2f} of one, {crowd.moved} moved"
        bar = at_least(crowd.goodput_ratio, GOODPUT_BAR) if crowd.gate == "on" else ""
        lines.append(Line(f"{crowd.senders} at once, gate {crowd.gate}", shown, bar))
    title = f"{plan.senders} senders into one port of {plan.rate_bits_per_s / 1e6:.0f} Mb/s"
    show(title, result, lines, json="--json" in arguments)
    if folder is not None:
        _write(result, folder)
    return 0 if not any(row.missed for row in result.rows) else 1


def _write(result: GateResult, folder: Path) -> None:
    (folder / "incast_lab.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    try:
        from worldmove.bench.lab.plot import draw  # noqa: PLC0415 - matplotlib is wanted for this alone
    except ImportError:
        sys.stderr.write("no picture: pip install 'worldmove[plot]'\n")
        return
    draw(result.rows, result.fan_in, folder / "incast_lab.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
