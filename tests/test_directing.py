"""What a node remembers of direct paths."""

from __future__ import annotations

from worldmove.directing import FAILED_S, DirectRates


def test_a_rate_counts_until_the_path_fails_and_a_failure_for_a_while() -> None:
    rates = DirectRates()
    assert rates.of("a", 0.0) is None
    rates.note("a", 200.0)
    assert (rates.of("a", 1e9), rates.of("b", 0.0)) == (200.0, None)
    rates.failed("a", 10.0)
    assert rates.of("a", 10.0 + FAILED_S / 2) == 0.0
    assert rates.of("a", 10.0 + FAILED_S) is None
    rates.failed("a", 10.0)
    rates.note("a", 100.0)
    assert rates.of("a", 11.0) == 100.0
