"""Accounts of leases."""

from __future__ import annotations

import pytest

from worldmove.transport import account
from worldmove.transport.account import Account, lines


def test_steps_add_up_from_the_first_beginning_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([3.0, 4.0, 4.5])
    monkeypatch.setattr(account.time, "perf_counter", lambda: next(clock))
    one = Account()
    assert one.told() == {}
    assert one.note("copy", 2.0, 5) == 3.0
    one.note("copy", 2.5, 7)
    one.note("send", 4.0)
    told = one.told()
    assert told["copy"] == {
        "count": 2, "sum_ms": 2500.0, "longest_ms": 1500.0, "first_ms": 0.0, "last_ms": 2000.0, "bytes": 12
    }  # fmt: skip
    assert told["send"]["first_ms"] == 2000.0
    assert [line.split()[0] for line in lines(told)] == ["copy", "send"]
