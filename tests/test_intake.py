"""What a node takes in by what was measured; samples that say nothing about other moves refuse none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import cast

import msgspec
import pytest
from machine_kit import HELLO

from worldmove import messages as m
from worldmove import rates as names
from worldmove.arrival import Arrival
from worldmove.config import Settings
from worldmove.errors import GateFullError, InadmissibleError
from worldmove.gate import Gate
from worldmove.granting.pauses import Need
from worldmove.intake import STALE_S, STOP_S, Intake
from worldmove.manifest import LeafMap, Manifest, Region, Span
from worldmove.paths import Path
from worldmove.probing import Probe

HORIZON_S = 0.25
HELLO_LIVE = msgspec.structs.replace(
    HELLO,
    horizon_ms=HORIZON_S * 1000,
    deadline_ms=10_000.0,
    terms=m.Terms(digest_bytes_per_s=2e9, dirty_bytes_per_s=1e3, egress_bytes_per_s=None),
)
HOPELESS = [
    (names.path_name("staged", HELLO.source), 1.0),
    (names.LINE, 1.0),
    (names.COMMIT, 4785.0),
    (names.RESUME, 4785.0),
    ("digest-destination-host", 1.0),
]


def asked(number: int) -> m.Hello:
    """A move of a session of its own."""
    return msgspec.structs.replace(HELLO_LIVE, move_id=f"move-{number}", session_id=f"world-{number}")


def intake(live_share: float = 1.0) -> Intake:
    return Intake(
        Settings(name="B", ledger="sqlite:///unused", run_dir=FilePath("unused"), live_share=live_share)
    )


@pytest.mark.parametrize(("name", "value"), HOPELESS)
def test_a_bad_sample_refuses_only_while_it_is_fresh(name: str, value: float) -> None:
    """Of the last ten minutes it is still the worst; what is newer decides, or nothing does."""
    now, fresh, old = time.monotonic(), intake(), intake()
    fresh.rates.note(name, value, now)
    with pytest.raises(InadmissibleError):
        fresh.admit(HELLO_LIVE, "staged")
    old.rates.note(name, value, now - STALE_S - 1)
    assert old.judge(HELLO_LIVE, "staged").provisional
    old.rates.note(name, 0.001 if name in names.TIMES else 1e9, now)
    verdict = old.admit(HELLO_LIVE, "staged")
    assert verdict.provisional
    assert verdict.required["pause_ms"] < HORIZON_S * 1000
    old.rates.note(name, value, now)
    with pytest.raises(InadmissibleError):
        old.admit(HELLO_LIVE, "staged")


def test_what_a_node_lends_to_live_rounds_counts_in_its_verdicts() -> None:
    rates = []
    for share in (1.0, 0.25):
        node = intake(share)
        node.rates.note(names.path_name("local", HELLO.source), 1e8, time.monotonic())
        rates.append(node.judge(HELLO_LIVE, "local").available["bytes_per_s"])
    assert rates[0] > 0.9e8
    assert rates[1] == 0.25e8


def arrival(node: Intake) -> Arrival:
    return Arrival(node, HELLO_LIVE, lambda _path, _nbytes, _seconds: None, 0.0)


def test_the_time_of_an_adoption_is_counted_from_its_own_commit() -> None:
    node = intake()
    usual = arrival(node)
    usual.verified()
    assert 0 <= usual.committed() < 1000
    usual.found_committed()
    assert 0 <= usual.adopted() < 1000
    now = time.monotonic()
    assert (node.rates.tail(names.COMMIT, now), node.rates.tail(names.RESUME, now)) != (None, None)


def test_an_adoption_after_a_lost_reply_or_a_wait_says_nothing_about_others() -> None:
    node = intake()
    lost = arrival(node)
    lost.verified()
    lost.found_committed()
    assert 0 <= lost.adopted() < 1000
    late = arrival(node)
    late.verified()
    late.committed()
    late.waits()
    assert 0 <= late.adopted() < 1000
    assert node.rates.tail(names.RESUME, time.monotonic()) is None


def test_moves_that_share_a_path_do_not_make_it_look_slow() -> None:
    """Eight at once bring an eighth of it each; what all bring together is what the path can do."""
    node, nbytes = intake(), 64 << 20
    hellos = [asked(number) for number in range(8)]
    for hello in hellos:
        node.admit(hello, "local")
    for hello in hellos:
        node.landed(hello.move_id, nbytes)
    for hello in hellos:
        node.note_round("local", hello.source, nbytes, 10.0)
    assert node.shown()["measured"][names.path_name("local", HELLO.source)] == 8 * nbytes / 10.0


@pytest.mark.parametrize("rounds", [False, True], ids=["probed", "landed"])
def test_no_pause_on_one_host_counts_less_than_copying_and_reading_back(rounds: bool) -> None:
    """A probe copies, a round there reads back as well: whichever tells the rate, no pause is too short."""
    node, hello, now = intake(), msgspec.structs.replace(asked(0), live=False), time.monotonic()
    nbytes, copying, reading = hello.manifest.nbytes, 2e8, 5e8
    took = nbytes / copying + nbytes / reading
    node.rates.note(names.digest_name("destination", hello.manifest), reading, now)
    if rounds:
        node.note_round("local", hello.source, nbytes, took)
    else:
        node.rates.note(names.path_name("local", hello.source), copying, now)
    pause = node.judge(hello, "local").pause
    assert pause.delta_bytes == nbytes
    assert took <= pause.work_s + 1e-12
    assert pause.work_s <= took + nbytes / reading + 1e-12, "by one reading back at most it is more"


def test_bytes_that_landed_before_a_round_are_not_its() -> None:
    flow = names.Flow()
    for second in range(4):
        flow.landed(10, float(second))
    assert [flow.since(began) for began in (-1.0, 1.5, 3.0, 3.5)] == [40, 20, 10, 0]


class Bare:
    """A path that brings everything at once."""

    width, batch_bytes = 1, 16 << 20

    def __init__(self, name: str = "local", rate: float | None = None) -> None:
        self.name, self.rate = name, rate
        self.pulled = 0

    def stand(self, seconds: float) -> None:
        """It goes first anyway."""

    async def pull(self, spans: Sequence[Span], *, urgent: bool) -> None:
        assert not urgent
        self.pulled += sum(span.length for span in spans)


async def test_a_path_is_not_probed_while_others_come_by_it() -> None:
    node, path = intake(), Bare()
    manifest = Manifest(
        model="m", revision=1, block_ms=40.0, horizon_ms=250.0, regions=(Region("k", "uint8", (8 << 20,)),)
    )
    hellos = [msgspec.structs.replace(asked(number), manifest=manifest) for number in range(2)]
    for hello in hellos:
        node.admit(hello, "local")
    leaf_map = LeafMap(manifest.regions)
    await node.confirm("move-0", cast("Path", path), leaf_map)
    assert path.pulled == 0
    node.over("move-1")
    await node.confirm("move-0", cast("Path", path), leaf_map)
    assert path.pulled > 0
    assert names.path_name("local", HELLO.source) in node.shown()["measured"]


HASTY = m.Terms(digest_bytes_per_s=2e9, dirty_bytes_per_s=1e9, egress_bytes_per_s=None)
"""Of a world that writes more than its path brings: no more than that is free beside its move."""


def hasty(number: int, session: str) -> m.Hello:
    return msgspec.structs.replace(asked(number), session_id=session, terms=HASTY, horizon_ms=5000.0)


def measured(node: Intake, rate: float) -> None:
    node.rates.note(names.path_name("direct", HELLO.source), rate, time.monotonic())


def test_a_session_that_asks_anew_is_not_judged_beside_its_former_move() -> None:
    """Whoever hears that a move was aborted may ask for the next before the destination is done with it."""
    node = intake()
    node.admit(hasty(0, "world"), "direct")
    measured(node, 5e8)
    with pytest.raises(GateFullError):
        node.admit(hasty(1, "other"), "direct")
    node.admit(hasty(2, "world"), "direct")
    node.over("move-0")
    assert node.reserved > 0, "what is over later takes nothing from the next one"


def test_another_node_that_names_a_session_takes_nothing_from_its_move() -> None:
    node = intake()
    node.admit(hasty(0, "world"), "direct")
    measured(node, 5e8)
    stranger = msgspec.structs.replace(hasty(1, "world"), source="stranger")
    node.rates.note(names.path_name("direct", "stranger"), 5e8, time.monotonic())
    with pytest.raises(GateFullError):
        node.admit(stranger, "direct")
    assert node.reserved > 0


@pytest.mark.parametrize("how", ["verified", "runs", "over"])
def test_a_move_of_which_nothing_more_comes_keeps_nothing_from_others(how: str) -> None:
    """It may still have lanes to give back, memory to wipe, or a peer that is slow to say goodbye."""
    node, hello = intake(), hasty(0, "world")
    node.admit(hello, "direct")
    measured(node, 5e8)
    with pytest.raises(GateFullError) as refused:
        node.admit(hasty(1, "other"), "direct")
    assert 0 < refused.value.details["retry_after_ms"] <= hello.deadline_ms
    getattr(Arrival(node, hello, lambda _path, _nbytes, _seconds: None, 0.0), how)()
    assert node.reserved == 0
    node.admit(hasty(1, "other"), "direct")


def test_lanes_that_are_not_given_back_yet_count() -> None:
    node = intake()
    hellos = [asked(number) for number in range(17)]
    for hello in hellos[:16]:
        node.admit(hello, "staged")
    node.came(hellos[0].move_id)
    with pytest.raises(GateFullError, match="16 moves"):
        node.admit(hellos[16], "staged")
    node.over(hellos[0].move_id)
    node.admit(hellos[16], "staged")


async def test_a_move_that_goes_staged_instead_is_owed_no_more_than_the_line_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not probed while others come by it; what it writes until its deadline would be all of theirs."""
    node, path = intake(), Bare("staged")
    node.rates.note(names.LINE, 5e8, time.monotonic())
    node.admit(hasty(0, "world"), "local")
    assert node.reserved > 5e8
    monkeypatch.setattr(Gate, "busy", True)
    await node.confirm("move-0", cast("Path", path), LeafMap(HELLO.manifest.regions))
    assert 0 < node.reserved < 5e8
    node.admit(hasty(1, "other"), "staged")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("how", ["came", "over"])
async def test_a_move_that_has_ended_when_its_path_is_measured_is_promised_nothing_anew(
    monkeypatch: pytest.MonkeyPatch, when: str, how: str
) -> None:
    """Nobody would take that promise back: its session has asked for the next move, or all of it is gone."""
    node, path = intake(), Bare("local")
    manifest = msgspec.structs.replace(HELLO.manifest, regions=(Region("k", "uint8", (8 << 20,)),))
    node.admit(msgspec.structs.replace(hasty(0, "world"), manifest=manifest), "direct")

    async def measured_late(*_args: object) -> Probe:
        getattr(node, how)("move-0")
        return Probe(1, 1.0, 5e8, 0.0)

    monkeypatch.setattr("worldmove.intake.probe", measured_late)
    if when == "before":
        getattr(node, how)("move-0")
    await node.confirm("move-0", cast("Path", path), LeafMap(manifest.regions))
    assert node.reserved == 0


async def test_what_was_promised_before_a_path_was_known_is_promised_anew() -> None:
    """A path that is measured when it is opened: nobody can be owed more than it brings."""
    node, path = intake(), Bare("direct", 5e8)
    node.admit(hasty(0, "world"), "direct")
    assert node.reserved > 5e8
    await node.confirm("move-0", cast("Path", path), LeafMap(HELLO.manifest.regions))
    assert 0 < node.reserved < 5e8
    node.admit(hasty(1, "other"), "direct")


async def test_worlds_that_stop_late_are_told_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round between being told and standing says nothing about how long it takes to stop."""
    node, clock, path = intake(), [time.monotonic()], Bare()
    asked: list[Need] = []
    monkeypatch.setattr("worldmove.arrival.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(node.gate, "turn", lambda _name, need: _noted(asked, need))
    block_s = HELLO_LIVE.manifest.block_ms / 1000
    for took_s, rounds in ((block_s / 2, ()), (9.0, (False,)), (block_s + 0.3, ()), (0.0, ())):
        one = arrival(node)
        node.admit(HELLO_LIVE, "local")
        await one.opened(cast("Path", path), LeafMap(HELLO_LIVE.manifest.regions))
        await one.turn()
        clock[0] += took_s
        for final in (*rounds, True):
            one.begins(final=final)
        node.over(HELLO_LIVE.move_id)
    assert [need.stop_s - block_s for need in asked] == pytest.approx([STOP_S, STOP_S, STOP_S, 0.3])


async def _noted(asked: list[Need], need: Need) -> float:
    asked.append(need)
    return 0.0
