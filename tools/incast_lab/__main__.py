"""The incast laboratory: what fan-in does to a receiver behind a shallow port, with and without a gate.

    python tools/incast_lab [--senders 12] [--rate-mbit 100] [--limit-kib 64] [--seconds 10]
                            [--state-kib 2048] [--deadline-ms 3000] [--loads 0.5,1,1.4,2,3,4] [--out DIR]

Makes hosts in network namespaces of its own, runs real nodes in them over UCX, and leaves nothing behind,
even when it is killed. It needs root (or user namespaces), iproute2 and ethtool. Prints a table; DIR gets
incast_lab.json, which `worldmove simulate --compare` reads, and incast_lab.png. First every load is offered,
then worlds of 1, 4 and all senders move at once, with the gate on and off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import msgspec

from worldmove.bench.lab import enclosure
from worldmove.bench.lab.plan import Plan
from worldmove.errors import WorldMoveError


def main() -> int:
    """Runs the laboratory; 0 if no move that was taken on was late."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--senders", type=int, default=12)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--limit-kib", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--state-kib", type=int, default=2048)
    parser.add_argument("--deadline-ms", type=float, default=3000.0)
    parser.add_argument("--loads", default="0.5,1,1.4,2,3,4")
    parser.add_argument("--out", type=Path, default=Path.cwd())
    options = parser.parse_args()
    plan = Plan(
        senders=options.senders,
        rate_bits_per_s=int(options.rate_mbit * 1e6),
        limit_bytes=options.limit_kib * 1024,
        seconds=options.seconds,
        loads=tuple(float(load) for load in options.loads.split(",")),
        fan_in=tuple(sorted({1, min(4, options.senders), options.senders})),
        deadline_ms=options.deadline_ms,
        state_bytes=options.state_kib * 1024,
    )
    words = [msgspec.json.encode(plan).decode(), "--out", str(options.out)]
    try:
        return enclosure.run("worldmove.bench.lab.gate", words)
    except WorldMoveError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
