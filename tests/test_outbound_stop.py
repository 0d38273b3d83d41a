"""What a source has armed for the stop of its world, and whether it begins then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldmove.outbound import LITTLE, Outbound

STATE = 1000


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("left", [0, int(LITTLE * STATE), int(LITTLE * STATE) + 1, STATE])
def test_a_table_is_read_at_the_stop_unless_lanes_have_much_to_copy(local: bool, left: int) -> None:
    calls: list[str] = []
    source: Any = SimpleNamespace(
        _direct=SimpleNamespace(look=lambda: calls.append("look")),
        _armed=SimpleNamespace(start=lambda: calls.append("start")),
        _local=local,
        _hello=SimpleNamespace(manifest=SimpleNamespace(nbytes=STATE)),
    )
    Outbound.expect_stop(cast(Outbound, source), left)
    begins = local or left <= LITTLE * STATE
    assert calls == (["look", "start"] if begins else ["look"])


def test_nothing_begins_where_nothing_is_armed() -> None:
    source: Any = SimpleNamespace(
        _direct=SimpleNamespace(look=lambda: None),
        _armed=None,
        _local=False,
        _hello=SimpleNamespace(manifest=SimpleNamespace(nbytes=STATE)),
    )
    Outbound.expect_stop(cast(Outbound, source), 0)
