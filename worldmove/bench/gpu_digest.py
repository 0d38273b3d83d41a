"""`worldmove bench digest --gpu`: shows what `gpu_rates` measures, once it is sure to load."""

from __future__ import annotations

import uvloop

from worldmove.bench.report import Line, at_least, show
from worldmove.cuda.probe import usable


def run(*, mb: int = 6038, repeats: int = 25, json: bool = False) -> int:
    """Measures on the first GPU that this process sees, and shows.

    Args:
        mb: megabytes (10⁶) to digest in a run.
        repeats: runs of each kind, taken in turn.
        json: one JSON document instead of a table.

    Returns:
        The exit code: 0 if every sampled digest is right.

    Raises:
        ConfigError: there is no GPU, or CuPy is missing.
    """
    uvloop.run(usable())
    from worldmove.bench.gpu_rates import REGIONS, UNIT, measure  # noqa: PLC0415 - loads CuPy

    result = measure(max(mb * 10**6 // REGIONS // UNIT, 1) * UNIT, repeats)
    lines = [Line("a plain read of it", f"{result.read_ms:.3f} ms, {result.read_gb_per_s:,.0f} GB/s")]
    lines += [
        Line(
            f"digest, leaves of {rate.leaf_bytes / 1024:g} KiB{'' if rate.equal else ': WRONG DIGESTS'}",
            f"{rate.ms:.3f} ms, {rate.gb_per_s:,.0f} GB/s, {rate.ratio_read:.2f} of the read",
            at_least(rate.ratio_read, rate.bar),
        )
        for rate in result.leaves
    ]
    title = f"digest of {result.nbytes / 1e9:.2f} GB in {result.regions} regions on {result.name}"
    show(title, result, lines, json=json)
    return 0 if all(rate.equal for rate in result.leaves) else 1
