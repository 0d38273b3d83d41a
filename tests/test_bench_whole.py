"""The benchmarks on real nodes, small: they end well, leave nothing, and answer in the documented form."""

from __future__ import annotations

import json

import pytest

from worldmove.bench import boundary, delta, path, receive
from worldmove.bench.nodes import running_nodes
from worldmove.client import AsyncClient
from worldmove.errors import NoMemoryError, ProcessLostError


def test_path_measures_all_three_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert path.run(gb=0.02, repeats=1, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= {
        "raw_tcp_gbps",
        "lanes_gbps",
        "verified_gbps",
        "ratio_verified_raw",
        "ratio_verified_lanes",
        "prepare_ms",
        "extra_bytes_peak",
    }
    assert 15e6 < result["state_bytes"] <= 20e6
    assert {name: len(values) for name, values in result["runs"].items()} == {
        "raw_tcp": 1,
        "lanes": 1,
        "verified": 1,
    }
    assert all(result[name] > 0 for name in ("raw_tcp_gbps", "lanes_gbps", "verified_gbps", "prepare_ms"))
    assert result["ratio_verified_raw"] == pytest.approx(result["verified_gbps"] / result["raw_tcp_gbps"])


def test_path_refuses_what_memory_cannot_hold() -> None:
    with pytest.raises(NoMemoryError) as caught:
        path.run(gb=100_000)
    assert caught.value.details["required_bytes"] > caught.value.details["available_bytes"]


def test_a_receiver_is_measured_with_and_without_gate_and_with_digests_in_its_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert receive.run(gb=0.02, repeats=1, senders=2, inline=True, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    rates = [result[f"{way}_gbps"] for way in ("open", "gated", "scheduled", "inline")]
    assert min(rates) > 0
    assert result["gate_overhead"] == pytest.approx(1 - rates[1] / rates[0])
    assert result["batch_ms_p99"].keys() == {"open", "gated", "scheduled", "inline"}
    assert (result["senders"], result["moves"]) == (2, 1000)
    assert 0 < result["verdict_ms_p50"] <= result["verdict_ms_p99"]


def test_delta_moves_a_world_that_generates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "PATTERNS", ("shift+sink",))
    assert delta.run(mb=40, repeats=1, block_ms=100.0, gate_rate="10Gbit", json=True) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    fractions = [row[f"{kind}_fraction"] for kind in ("sent", "copied", "kept")]
    assert sum(fractions) == pytest.approx(1)
    assert row["pattern"] == "shift+sink"
    assert 0 < row["pause_ms"] <= row["total_ms"]
    assert row["pause_ratio_to_full"] == pytest.approx(row["pause_ms"] / row["full_pause_ms"])
    assert (row["rounds"] >= 3, len(row["pauses_ms"])) == (True, 1)


def test_boundary_times_single_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary.run(calls=200, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["calls"] == 200
    assert 0 < result["idle_us_p50"] <= result["idle_us_p99"]


async def test_nodes_of_a_benchmark_share_a_ledger() -> None:
    async with running_nodes(("A", "B")) as nodes:
        assert [node.name for node in nodes] == ["A", "B"]
        async with AsyncClient(nodes[0].url) as client:
            assert {peer.name for peer in await client.nodes()} == {"A", "B"}


async def test_a_node_that_cannot_start_says_why() -> None:
    with pytest.raises(ProcessLostError, match="lanes"):
        async with running_nodes(("A",), ("--lanes", "1000")):
            pass
