"""What a source has armed for the stop of its world, and whether it begins then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worldmove import outbound
from worldmove.errors import ProcessLostError
from worldmove.outbound import FEW_ARMED, LITTLE, Outbound

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


class Reader:
    """Plans a table in some parts on one GPU, or fails to get ready."""

    def __init__(self, parts: int, *, arms: bool = True, ready: bool = True) -> None:
        self.plan = SimpleNamespace(parts=[(SimpleNamespace(arms=arms), [object()] * parts)])
        self.few: bool | None = None
        self._ready = ready

    def all_spans(self) -> list[object]:
        return []

    def plan_read(self, _table: object, _spans: object, *, few: bool) -> Any:
        self.few = few
        return self.plan

    async def prepare(self, _plan: object) -> None:
        if not self._ready:
            raise ProcessLostError("the executor ended")


@pytest.mark.parametrize(
    ("reader", "local", "page", "armed"),
    [
        (Reader(FEW_ARMED), False, 7, True),
        (Reader(FEW_ARMED + 1), False, 7, False),  # rings need the executor, too
        (Reader(FEW_ARMED + 1), True, 7, True),
        (Reader(1), False, None, False),  # nobody can see its stop
        (Reader(1, arms=False), False, 7, False),
        (Reader(1, ready=False), True, 7, False),  # goes without
    ],
)
async def test_what_is_armed(
    reader: Reader, local: bool, page: int | None, armed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(_page: int, pools: list[object]) -> list[object]:
        return pools

    monkeypatch.setattr(outbound, "Sign", SimpleNamespace(open=opened))
    monkeypatch.setattr(outbound, "Armed", lambda plan, _sign: plan)
    source: Any = SimpleNamespace(
        _reader=reader,
        _local=local,
        _page=lambda: page,
        _armed=None,
        _log=SimpleNamespace(info=lambda *_, **__: None),
        table=None,
    )
    shown = await Outbound._arm(cast(Outbound, source))
    assert shown == ((page,) if armed else ())
    assert source._armed is (reader.plan if armed else None)
    assert reader.few is not local
