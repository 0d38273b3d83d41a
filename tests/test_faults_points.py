"""Names of faults, where they can happen, and how they are armed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worldmove import messages as m
from worldmove.config import load
from worldmove.errors import ConfigError
from worldmove.faults.armory import Armory
from worldmove.faults.door import FaultDoor, order
from worldmove.faults.equipment import Equipment
from worldmove.faults.lies import LIES, SENT
from worldmove.faults.points import PHASES, WHATS, every_fault, parse, possible
from worldmove.protocol import State

ROOT = Path(__file__).resolve().parent.parent


def test_every_fault_is_read_back_from_its_name() -> None:
    faults = every_fault()
    assert parse(",".join(fault.name for fault in faults)) == faults
    assert {fault.what for fault in faults} == set(WHATS)
    assert {(fault.side, fault.phase) for fault in faults} == {
        (side, phase) for side, phases in PHASES.items() for phase in phases
    }


def test_names_of_others_pass_by() -> None:
    assert parse("") == parse("arm") == parse("lane-stall, arm") == ()
    (fault,) = parse(" every:destination.verifying.ledger-late=800 ")
    assert (fault.side, fault.phase, fault.what, fault.ms, fault.every) == (
        *("destination", State.VERIFYING, "ledger-late", 800, True),
    )
    assert fault.name == "every:destination.verifying.ledger-late=800"


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "source.copying",
        "source.copying.explode",
        "middle.copying.kill",
        "source.rejected.kill",
        "destination.pausing.kill",
        "source.copying.kill=5",
        "source.copying.delay=0",
        "source.copying.delay=x",
        "source.copying.delay=99999999",
        "source.copying.lie-token",
        "destination.admitted.lane-stall",
        "source.copying.ledger-lost",
    ],
)
def test_a_fault_that_cannot_be_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"source.copying.kill,{name}")
    assert name in str(caught.value)


def test_a_fault_happens_once_unless_it_is_for_every_move() -> None:
    armory = Armory(parse("source.copying.cut,every:source.copying.mute,destination.copying.cut"))
    assert armory.awaits("source", State.COPYING)
    assert not armory.awaits("source", State.COMMITTED)
    assert [fault.what for fault in armory.take("source", State.COPYING)] == ["cut", "mute"]
    assert [fault.what for fault in armory.take("source", State.COPYING)] == ["mute"]
    assert armory.take("source", State.PAUSING) == []
    armory.disarm()
    assert armory.take("destination", State.COPYING) == []


def test_without_the_option_there_is_nothing(tmp_path: Path) -> None:
    settings = load({"name": "A", "run_dir": str(tmp_path)}, environ={"HOME": str(tmp_path)})
    assert Equipment.of(settings, keeper=lambda: 0) is None


def test_a_node_does_not_start_with_an_unknown_fault(tmp_path: Path) -> None:
    given = {"name": "A", "run_dir": str(tmp_path), "faults": "source.copying.explode"}
    with pytest.raises(ConfigError, match="explode"):
        Equipment.of(load(given, environ={"HOME": str(tmp_path)}), keeper=lambda: 0)


async def test_faults_are_armed_over_a_private_socket(tmp_path: Path) -> None:
    armory = Armory()
    door = FaultDoor(tmp_path / "faults.sock", armory)
    await door.start()
    try:
        assert (tmp_path / "faults.sock").stat().st_mode & 0o777 == 0o600
        answer = await order(tmp_path, arm="source.copying.cut")
        assert (answer.armed, answer.fired) == (["source.copying.cut"], [])
        with pytest.raises(ConfigError, match="explode"):
            await order(tmp_path, arm="source.copying.explode")
        armory.note(armory.take("source", State.COPYING)[0], "m")
        assert (await order(tmp_path)).fired == ["source.copying.cut"]
        answer = await order(tmp_path, disarm=True)
        assert (answer.armed, answer.fired) == ([], [])
    finally:
        await door.close()
    with pytest.raises(FileNotFoundError):
        await order(tmp_path)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"[1]\n", b'{"arm": 7}\n', b'{"boom": 1}\n', b"\xff\n", b"{" * 70_000]
)
async def test_noise_at_the_socket_harms_nobody(tmp_path: Path, line: bytes) -> None:
    armory = Armory()
    door = FaultDoor(tmp_path / "faults.sock", armory)
    await door.start()
    try:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "faults.sock")
        writer.write(line)
        writer.write_eof()
        assert b"armed" not in await reader.read()
        writer.close()
        assert (await order(tmp_path)).armed == []
    finally:
        await door.close()


MESSAGES = [kind for phases in SENT.values() for kinds in phases.values() for kind in kinds]


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lie_is_told_in_messages_that_are_sent(lie: str) -> None:
    assert set(LIES[lie]) <= set(MESSAGES)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("lie-digest", m.TablePart(number=1, first=0, digests=bytes(32))),
        ("lie-length", m.TablePart(number=1, first=0, digests=bytes(32))),
        ("lie-round", m.TableEnd(number=1)),
        ("lie-root", m.Sealed(block=1, host_states=(b"x",), root="0" * 64)),
        ("lie-state", m.Sealed(block=1, host_states=(b"x",), root="0" * 64)),
        ("lie-epoch", m.Adopted(epoch=2, resume_ms=1.0)),
        ("lie-token", m.Begin(lanes=(m.LaneOffer("127.0.0.1", 7, bytes(32)),))),
        ("lie-token", m.Begin(socket="/run/s", token=bytes(32), extent_bytes=(512,))),
        ("lie-length", m.Begin(socket="/run/s", token=bytes(32), extent_bytes=(512,))),
    ],
)
def test_a_lie_is_well_formed(lie: str, message: m.Message) -> None:
    told = LIES[lie][type(message)](message)
    assert m.decode(m.encode(told)) == told != message


def test_the_table_of_the_documentation_is_complete() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    for what, about in WHATS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{what}`"))
        assert about.text in row
        for side, phases in PHASES.items():
            can = [phase for phase in phases if possible(side, phase, what)]
            if 0 < len(can) < len(phases):
                assert f"{side}: {', '.join(can)}" in row
