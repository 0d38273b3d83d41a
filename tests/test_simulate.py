"""The simulator: scenarios are checked, what is taken on keeps its word, both resolutions agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worldmove.errors import ConfigError
from worldmove.simulate.engine import Run
from worldmove.simulate.outcome import laboratory
from worldmove.simulate.run import simulate
from worldmove.simulate.scenario import Line, Scenario, parse, read

SCENARIOS = Path(__file__).resolve().parent.parent / "docs" / "scenarios"
SMALL: dict[str, Any] = {
    "name": "small",
    "nodes": 4,
    "line": {"rate": "1Gbit"},
    "moves": {"loads": [1.0], "seconds": 20, "state": ["20MB"], "into": "one", "deadline_ms": 8000},
}


def changed(**tables: Any) -> Scenario:
    document = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for name, value in tables.items():
        document[name] = document.get(name, {}) | value if isinstance(value, dict) else value
    return parse(document)


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.toml")), ids=lambda file: file.stem)
def test_the_scenarios_of_the_docs_can_be_read(file: Path) -> None:
    assert read(file).moves.loads


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"nodes": 1}, "nodes"),
        ({"nodes": "two"}, "nodes"),
        ({"line": {"rate": "fast"}}, "line.rate"),
        ({"line": {"fan_in": [[2, 1.0], [1, 0.5]]}}, "line.fan_in"),
        ({"line": {"fan_in": []}}, "line.fan_in"),
        ({"moves": {"loads": []}}, "moves.loads"),
        ({"moves": {"loads": [0]}}, "moves.loads"),
        ({"moves": {"state": ["big"]}}, "moves.state"),
        ({"moves": {"state": []}}, "moves.state"),
        ({"moves": {"horizon_ms": 0}}, "moves.horizon_ms"),
        ({"moves": {"arrivals": "never"}}, "arrivals"),
        ({"costs": {"spread": 1.5}}, "costs.spread"),
        ({"costs": {"open_ms": -1}}, "costs.open_ms"),
        ({"gate": {"on": False}, "nodes": 65}, "gate.on"),
        ({"gate": {"of": False}}, "of"),
    ],
)
def test_what_is_wrong_is_named(tables: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        changed(**tables)


def test_files_that_are_no_scenario_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff = 1")
    with pytest.raises(ConfigError, match="no TOML"):
        read(tmp_path / "odd.toml")


def test_fan_in_lies_on_lines_between_what_was_measured() -> None:
    line = Line(fan_in=((1, 1.0), (4, 0.4)))
    assert [line.share(senders) for senders in (1, 2, 4, 9)] == pytest.approx([1.0, 0.8, 0.4, 0.4])


def test_overload_is_rejected_and_what_is_taken_on_fills_the_line_in_time() -> None:
    result = simulate(changed(moves={"loads": [0.5, 4.0], "live": False}))
    low, high = result.rows
    assert (low.missed, high.missed) == (0, 0)
    assert low.admitted >= 0.98 * low.asked
    assert high.rejected > 2 * high.admitted
    assert high.goodput_ratio > 0.9
    assert high.max_pause_ms <= 1000
    assert set(high.rejected_by_code) <= {"gate-full", "inadmissible"}


def test_without_a_gate_fan_in_collapses() -> None:
    fan_in = {"rate": "1Gbit", "fan_in": [[1, 0.96], [4, 0.54], [12, 0.23]]}
    moves = {"loads": [2.0], "live": False}
    gated = simulate(changed(nodes=13, line=fan_in, moves=moves)).rows[0]
    loose = simulate(changed(nodes=13, line=fan_in, moves=moves, gate={"on": False})).rows[0]
    assert loose.goodput_ratio < 0.4 < 0.9 < gated.goodput_ratio
    assert loose.missed > 0 == gated.missed


def test_both_resolutions_agree() -> None:
    for live in (False, True):
        moves = {"loads": [0.7, 1.5], "live": live, "seconds": 60}
        fine = simulate(changed(moves=moves, model="grants")).rows
        coarse = simulate(changed(moves=moves, model="rates")).rows
        for one, other in zip(fine, coarse, strict=True):
            assert one.missed == other.missed == 0
            assert one.goodput_ratio == pytest.approx(other.goodput_ratio, rel=0.1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    load=st.floats(0.3, 6.0),
    dirty=st.none() | st.floats(0.0, 1.0),
    horizon=st.floats(50.0, 3000.0),
    deadline=st.floats(2000.0, 20_000.0),
    block=st.floats(20.0, 1000.0),
    spread=st.floats(0.0, 0.3),
    digest=st.sampled_from(["100Gbit", "10Gbit", "2Gbit"]),
    arrivals=st.sampled_from(["poisson", "burst"]),
    into=st.sampled_from(["one", "all"]),
    model=st.sampled_from(["grants", "rates"]),
    seed=st.integers(0, 1000),
)
def test_whatever_is_taken_on_meets_its_horizon_and_its_deadline(
    load: float,
    dirty: float | None,
    horizon: float,
    deadline: float,
    block: float,
    spread: float,
    digest: str,
    arrivals: str,
    into: str,
    model: str,
    seed: int,
) -> None:
    """`dirty`: the share of the state that a block rewrites meanwhile; `None`: nothing is copied before."""
    scenario = changed(
        model=model,
        seed=seed,
        costs={"spread": spread, "destination_digest": digest},
        moves={
            "loads": [load],
            "seconds": 10,
            "live": dirty is not None,
            "dirty": dirty or 0.0,
            "horizon_ms": horizon,
            "deadline_ms": deadline,
            "block_ms": block,
            "arrivals": arrivals,
            "into": into,
            "state": ["5MB", "40MB"],
        },
    )
    run = Run(scenario, load)
    run.run()
    taken = [each for each in run.ended if each.admitted]
    late = [
        (each.pause_s * 1000 - horizon, each.total_s * 1000 - deadline)
        for each in taken
        if each.pause_s * 1000 > horizon or each.total_s * 1000 > deadline
    ]
    assert not late
    assert {each.code for each in run.ended} <= {None, "gate-full", "inadmissible"}


def test_reading_back_that_takes_as_long_as_sending_is_counted_in_each_worlds_turn() -> None:
    """Not only in proportion to what is sent: 490 of 1,235 such moves were late, by up to 0.8 s."""
    slow = changed(
        nodes=13,
        seed=8140,
        line={"rate": "5Gbit", "rtt_ms": 0.2},
        costs={"spread": 0.2, "open_ms": 150.0, "destination_digest": "10Gbit"},
        gate={"batch": "4MiB"},
        moves={
            "state": ["1MB"],
            "live": False,
            "seconds": 5,
            "block_ms": 60.4,
            "horizon_ms": 32.2,
            "deadline_ms": 4275.6,
        },
    )
    run = Run(slow, 0.7)
    run.run()
    taken = [each for each in run.ended if each.admitted]
    assert len(taken) > 700
    assert not [each for each in taken if each.missed]


def test_the_command_writes_a_document_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    measured = {
        "rows": [
            {
                "offered_load": 1.0,
                "admitted": 9,
                "rejected": 1,
                "missed": 0,
                "goodput_ratio": 0.93,
                "p99_pause_ms": 412.0,
                "more": 1,
            }
        ]
    }
    (tmp_path / "gate.json").write_text(json.dumps(measured))
    text = '[moves]\nloads = [1.0]\nseconds = 5\nstate = ["20MB"]\ninto = "one"\n[line]\nrate = "1Gbit"\n'
    (tmp_path / "one.toml").write_text(text)
    command = [sys.executable, "-m", "worldmove", "simulate", str(tmp_path / "one.toml"), "--json"]
    command += ["--plot", str(tmp_path / "one.png"), "--compare", str(tmp_path / "gate.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rows"][0]["missed"] == 0
    assert document["measured"][0]["goodput_ratio"] == 0.93
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_compared_has_to_be_the_laboratorys(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(msgspec.json.encode({"rows": [{"offered_load": 1.0}]}))
    with pytest.raises(ConfigError, match="no result of worldmove bench gate"):
        laboratory(tmp_path / "x.json", (1.0,))
