"""Nodes of one host whose GPUs can't reach one another: `auto` takes another path, `local` is refused.

The GPUs are imagined (tests/fake_gpu): their driver denies what MIG slices, hypervisors and containers do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from gpu_kit import GPUS, one_each, programs
from machine_kit import HELLO

from worldmove.bench.moves import Shuttle, shuttle
from worldmove.bench.nodes import RunningNode, running_nodes
from worldmove.client import AsyncClient
from worldmove.errors import MoveAbortedError, ProcessLostError, ValidationError
from worldmove.executor.messages import HIDDEN, NO_ACCESS, OPEN
from worldmove.manifest import Manifest, Region
from worldmove.node.admitting import Admission
from worldmove.reaching import KEPT_S, Reaches
from worldmove.views import MigrationRequest, SessionSpec

OPTIONS = ["--path", "auto", "--executors", "1", "--log-level", "info", "--peer-timeout-ms", "20000"]
ANY_RATE = ["--direct-min-gbps", "0"]
ALONE = {name: ["env", f"CUDA_VISIBLE_DEVICES={gpu}"] for name, gpu in zip("AB", GPUS, strict=True)}
"""As in containers that are given one GPU each."""


def whole(test: Any) -> Any:
    """A test with real nodes."""
    return pytest.mark.timeout(300)(pytest.mark.usefixtures("imagined")(test))


def family(pid: int) -> Iterator[Path]:
    """A node's process and all that it has started, as folders in /proc."""
    here = Path(f"/proc/{pid}")
    yield here
    for child in itertools.chain.from_iterable(
        task.read_text().split() for task in here.glob("task/*/children")
    ):
        yield from family(int(child))


def foreign(node: RunningNode, number: int) -> list[str]:
    """What processes of a node hold of the memory of the GPU with this number: mappings and descriptors."""
    held = []
    for process in family(node.pid):
        lines = process.joinpath("maps").read_text().splitlines()
        for descriptor in process.glob("fd/*"):
            try:
                lines.append(str(descriptor.readlink()))
            except OSError:
                continue
        held += [f"{process.name}: {line}" for line in lines if f"imagined-gpu-{number}-" in line]
    return held


def tries(logs: Path, word: str = "") -> int:
    """How often a path was opened in vain, for a reason with this word."""
    lines = [line for log in logs.glob("?.log") for line in log.read_text().splitlines()]
    return sum("another path is taken" in line and word in line for line in lines)


def two(logs: Path, *more: str, within: Mapping[str, Sequence[str]] | None = None) -> Any:
    """Nodes A and B with a GPU each, for one test."""
    return running_nodes(["A", "B"], [*OPTIONS, *more], one_each("--direct-ring", "512MiB"), logs, within)


@whole
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("none", "no peer access"),
        ("denied", "cuMemSetAccess: CUDA_ERROR_INVALID_VALUE"),
        ("hidden", "do not see that GPU"),
    ],
)
async def test_local_is_refused_by_name_and_auto_goes_another_way_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, why: str
) -> None:
    """The actors compare every byte, in memory that was poisoned; see `bench.gpu_actor`."""
    if case != "hidden":
        monkeypatch.setenv("IMAGINED_PEERS", case)
    async with (
        two(tmp_path, within=ALONE if case == "hidden" else None) as nodes,
        shuttle(nodes, 0, programs("small")) as way,
    ):
        if case == "denied":
            await aborts_before_the_pause(way)
            assert not foreign(nodes[1], 0)
        await is_refused(way, nodes)
        for number in range(4):
            receipt = (await way.move("auto", live=number in (1, 2))).receipt
            assert (receipt.path, receipt.damaged) == ("staged", ())
            reason = receipt.path_reason or ""
            assert all(part in reason for part in (*GPUS, why)), reason
            assert receipt.sent_bytes >= receipt.state_bytes
            left = 1 - way.home
            assert not foreign(nodes[way.home], left), "the source's memory is still held"
    # Only mapping shows that it is denied: once each way, the first time by name. What is known is not tried,
    # but for direct lanes.
    assert [tries(tmp_path, word) for word in ("cuMemSetAccess", "path direct brought")] == [
        1 if case == "denied" else 0,
        2,
    ]


async def aborts_before_the_pause(way: Shuttle) -> None:
    """No lanes are there in case; from then on it is known, and refused as soon as it is asked for."""
    with pytest.raises(MoveAbortedError, match=r"path 'local' cannot be had: .*cuMemSetAccess"):
        await way.move("local")


async def is_refused(way: Shuttle, nodes: Sequence[RunningNode]) -> None:
    """The field, both devices and what is allowed; the world lives on where it is, and can go by `auto`."""
    with pytest.raises(ValidationError) as refused:
        await way.move("local")
    assert refused.value.details["field"] == "path"
    assert all(part in refused.value.message for part in ("'local'", *GPUS, "allowed: auto, staged"))
    async with AsyncClient(nodes[0].url) as client:
        wanted = MigrationRequest(session_id="bench", destination="B", live=False)
        verdict = await client.dry_run(msgspec.structs.replace(wanted, path="local"))
        assert (verdict.admissible, verdict.code) == (False, "validation")
        assert (await client.dry_run(wanted)).admissible


@whole
async def test_the_next_path_is_the_direct_one_where_it_suits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGINED_PEERS", "none")
    async with two(tmp_path, *ANY_RATE) as nodes, shuttle(nodes, 0, programs("odd")) as way:
        receipt = (await way.move("auto")).receipt
        assert receipt.path == "direct"
        assert receipt.path_reason == f"{GPUS[1]} cannot map the memory of {GPUS[0]}: no peer access"
        assert receipt.path_gbps is not None


@whole
async def test_where_memory_can_be_mapped_auto_stays_local(tmp_path: Path) -> None:
    async with two(tmp_path) as nodes, shuttle(nodes, 0, programs("small")) as way:
        for _ in range(4):
            receipt = (await way.move("auto")).receipt
            assert (receipt.path, receipt.path_reason, receipt.lanes) == ("local", None, 0)
        async with AsyncClient(nodes[0].url) as client:
            assert all(lane.migration_id is None for lane in (await client.node()).lanes)
    assert not tries(tmp_path)


@whole
async def test_a_local_move_does_not_need_the_lanes_that_are_there_in_case(tmp_path: Path) -> None:
    """Their rings take 64 MiB of host memory each."""
    limit = ("--memory-limit", "32MiB")
    async with two(tmp_path, *limit) as nodes, shuttle(nodes, 0, programs("small")) as way:
        receipt = (await way.move("auto")).receipt
        assert (receipt.path, receipt.path_reason) == ("local", None)
    assert "no lanes in case the local path fails" in (tmp_path / "A.log").read_text()


@whole
@pytest.mark.parametrize("case", ["none", "denied"])
async def test_within_a_node_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("IMAGINED_PEERS", case)
    options = [*OPTIONS, "--gpus", ",".join(GPUS), "--direct-ring", "512MiB"]
    async with running_nodes(["A"], options, logs=tmp_path) as nodes, AsyncClient(nodes[0].url) as client:
        regions = (Region("k", "uint8", (1 << 20,), device=GPUS[0]),)
        await client.register(SessionSpec(id="w", manifest=Manifest("m", regions, 20.0, 10_000.0)))
        wanted = MigrationRequest(
            session_id="w",
            destination="A",
            devices={GPUS[0]: GPUS[1]},
            live=False,
            allow_unattended=True,
        )
        views = [view async for view in client.migration_events((await client.migrate(wanted)).id)]
        receipt = views[-1].receipt
        assert receipt is not None
        assert (receipt.state, receipt.path) == ("released", "staged"), receipt
        assert receipt.source_root == receipt.destination_root
        assert receipt.devices == ((GPUS[0], GPUS[1]),)
        assert GPUS[0] in (receipt.path_reason or "")


class Pool:
    """A GPU's executors, as far as they are asked what they can reach."""

    def __init__(self, *answers: int) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    async def reach(self, devices: list[str]) -> tuple[int, ...]:
        self.asked.append(devices)
        if not self.answers:
            raise ProcessLostError("there is no executor now")
        return self.answers[: len(devices)]


def reaches(**pools: Pool) -> Reaches:
    return Reaches(cast(Any, pools))


async def test_an_answer_is_kept_for_a_while() -> None:
    pool = Pool(NO_ACCESS, HIDDEN, OPEN)
    known = reaches(mine=pool)
    for now in (0.0, 1.0, KEPT_S - 1):
        await known.ask({"a", "b", "c", "mine"}, now)
        assert known.why_not([("a", "mine")], now) == "mine cannot map the memory of a: no peer access"
        assert "do not see that GPU" in known.why_not([("c", "mine"), ("b", "mine")], now)
        assert not known.why_not([("c", "mine"), ("mine", "mine")], now)
    assert pool.asked == [["a", "b", "c"]]
    await known.ask({"a", "d"}, KEPT_S)
    assert pool.asked[1:] == [["a", "d"]]


async def test_where_nobody_answers_nothing_is_known_and_the_next_one_asks_again() -> None:
    pool = Pool()
    known = reaches(mine=pool)
    for now in (0.0, 1.0):
        await known.ask({"a"}, now)
        assert not known.why_not([("a", "mine")], now)
    assert len(pool.asked) == 2


async def test_what_a_move_has_found_counts_more_than_what_was_said() -> None:
    known = reaches(mine=Pool(OPEN))
    await known.ask({"a"}, 0.0)
    pair = [("a", "mine")]
    assert not known.proven(pair)
    assert known.proven([("mine", "mine")])
    known.mapped(pair)
    assert known.proven(pair)
    assert known.refused(pair, "cuMemSetAccess: no", 1.0)
    assert not known.proven(pair)
    assert "that of a by mine: cuMemSetAccess: no" in known.why_not(pair, KEPT_S)
    assert not known.why_not(pair, 1.0 + KEPT_S)
    assert not known.refused([("mine", "mine")], "something else", 2.0)
    assert not known.why_not([("mine", "mine")], 2.0)


async def test_nothing_is_waited_for_once_a_standby_is_back() -> None:
    """Executors may take seconds to say what they reach: somebody else would have the standby by then."""
    order: list[str] = []

    def noted(word: str) -> Any:
        async def note(*_args: object) -> None:
            order.append(word)

        return note

    node: Any = SimpleNamespace(
        look=noted("look"), _gone=noted("gone"), _returned=noted("returned"), _reserve=noted("reserve")
    )
    node._settings = SimpleNamespace(peer_timeout_ms=1000.0)
    node._intake = SimpleNamespace(admit=lambda _hello, path: order.append(path))
    node.check, node._wanted = lambda _hello: "local", lambda _hello: None
    await Admission.admit(node, HELLO)
    assert order == ["look", "gone", "returned", "local", "reserve"]
