"""The timeline of a move, and its picture: bounded, monotonic, and drawn from whatever a receipt tells."""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_kit import Fleet
from hypothesis import given
from hypothesis import strategies as st
from moves_kit import Traveller
from typer.testing import CliRunner

from worldmove import picture
from worldmove.cli.commands import app
from worldmove.cli.moveplot import draw
from worldmove.errors import ConfigError, ConflictError
from worldmove.manifest import Region
from worldmove.timeline import MOST_BLOCKS, Timeline
from worldmove.views import BlockEnd, MigrationView, Receipt, RoundView

PNG = b"\x89PNG\r\n\x1a\n"


def receipt(**more: Any) -> Receipt:
    base = Receipt(
        migration_id="m", session_id="s", source="A", destination="B", state="released", path="staged",
        live=True, epoch=2, block=9, state_bytes=10, sent_bytes=12, kept_bytes=3, copied_bytes=5,
        repair_bytes=1, damaged=(), source_root="aa", destination_root="aa", pause_ms=4.0, data_ms=2.0,
        commit_ms=1.0, resume_ms=1.0, total_ms=50.0, missed=False, lanes=1,
        finished_at="2026-01-01T00:00:00Z", stopped_ms=40.0, resumed_ms=44.0,
        blocks=(BlockEnd(number=8, ms=20.0), BlockEnd(number=9, ms=40.0)),
        rounds=(
            RoundView(number=1, final=False, leaves=1, bytes=9, ms=20.0, start_ms=5.0),
            RoundView(number=2, final=True, leaves=1, bytes=2, ms=1.5, copied_bytes=5, start_ms=40.5),
        ),
    )  # fmt: skip
    return msgspec.structs.replace(base, **more)


def view(found: Receipt | None) -> MigrationView:
    return MigrationView(
        id="m", session_id="s", source="A", destination="B", state=found.state if found else "copying",
        live=True, path="staged", round=2, state_bytes=10, sent_bytes=12,
        created_at="2026-01-01T00:00:00Z", elapsed_ms=60.0, receipt=found,
    )  # fmt: skip


def older(found: Receipt) -> Receipt:
    """As a node wrote it that knew of no timeline."""
    document = msgspec.to_builtins(found)
    for name in ("blocks", "stopped_ms", "resumed_ms"):
        del document[name]
    for each in document["rounds"]:
        del each["start_ms"]
    return msgspec.convert(document, Receipt)


RECEIPTS = {
    "a whole one": receipt(),
    "an older one": older(receipt()),
    "no rounds": receipt(rounds=(), blocks=(), stopped_ms=None, resumed_ms=None, state="rejected"),
    "the world went on at its source": receipt(
        state="aborted", code="horizon", pause_ms=None, data_ms=None, commit_ms=None, resume_ms=None
    ),
    "nobody knows when it went on": receipt(
        pause_ms=None, data_ms=None, commit_ms=None, resume_ms=None, resumed_ms=None
    ),
    "text that is no mathematics": receipt(session_id="a$\\frac$b" * 20, code="$x_"),
}


@pytest.mark.parametrize("case", RECEIPTS)
def test_every_receipt_is_drawn(case: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture.save(draw(view(RECEIPTS[case])), tmp_path / "move.png")
    assert (tmp_path / "move.png").read_bytes().startswith(PNG)


def test_what_is_drawn_is_what_the_receipt_tells() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    blocks, rounds, kinds = draw(view(receipt())).axes
    assert [tuple(point) for point in blocks.lines[1].get_xydata()] == [(20.0, 8.0), (40.0, 9.0)]
    spans = [patch.get_x() for patch in rounds.patches]
    assert spans == [40.0, 42.0, 43.0]
    said = [text.get_text().strip() for text in kinds.texts]
    assert said == ["sent 9 B", "sent 2 B, repaired 1 B, copied 5 B, kept 3 B"]
    plain = draw(view(older(receipt()))).axes
    assert not plain[0].lines
    assert "end to end" in plain[1].get_xlabel()


def test_a_move_without_a_receipt_is_not_drawn() -> None:
    with pytest.raises(ConflictError, match="move m is copying: it is drawn from its receipt"):
        draw(view(None))


def test_names_that_no_picture_can_have(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name, text in (("a.pdf", "ends in .png"), ("a", "ends in .png"), ("no/a.png", "there is no folder")):
        with pytest.raises(ConfigError, match=text) as caught:
            picture.check(tmp_path / name)
        assert name in caught.value.message
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        picture.save(picture.new(1, 1), tmp_path / "folder.png")
    picture.check(tmp_path / "A.PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"worldmove\[plot\]"):
        picture.check(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"worldmove\[plot\]"):
        picture.new(1, 1)


@given(steps=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=40), repeats=st.integers(1, 40))
def test_blocks_are_bounded_and_in_order(steps: list[tuple[int, float]], repeats: int) -> None:
    times, block, now, seen = Timeline(0.0, 10.0), 5, 0.0, set()
    times.saw(block, now)
    for more, later in steps * repeats:
        block, now = block + more, now + later
        times.saw(block, now)
        seen.add(block)
    times.stopped(block + 1, now + 0.5, attended=True)
    found = times.blocks
    assert len(found) <= MOST_BLOCKS
    assert found[-1] == BlockEnd(number=block + 1, ms=times.stopped_ms or 0.0)
    assert all(a.number < b.number and a.ms <= b.ms for a, b in pairwise(found))
    assert {each.number for each in found[:-1]} <= seen - {5}


def test_the_end_of_the_last_block_is_when_the_world_stood() -> None:
    """A look may have come after the ranks had stopped."""
    times = Timeline(10.0, 100.0)
    times.saw(1, 10.0)
    times.saw(2, 10.5)
    times.stopped(2, 10.25, attended=True)
    assert (times.blocks, times.pause_ms) == ((BlockEnd(number=2, ms=250.0),), None)
    times.resumed(10.75)
    assert times.pause_ms == 500.0


def test_a_world_without_workers_ends_no_block() -> None:
    times = Timeline(0.0, 100.0)
    times.saw(7, 0.0)
    times.stopped(7, 0.5, attended=False)
    assert (times.blocks, times.stopped_ms) == ((), 500.0)


async def test_watching_ends_when_the_world_stands() -> None:
    times, looks = Timeline(time.monotonic(), 10.0), iter(range(1000))

    def look() -> int:
        block = next(looks)
        if block == 3:
            loop.call_soon(lambda: times.stopped(4, time.monotonic(), attended=True))
        return block

    loop = asyncio.get_running_loop()
    await asyncio.wait_for(times.watch(look), 30)
    assert [each.number for each in times.blocks] == [1, 2, 3, 4]


def test_a_real_move_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with Fleet("A", "B") as fleet, fleet.turn():
        world = Traveller(fleet, "w", [Region("k", "float32", (500_000,))])
        moved = world.go("B", path="staged")  # checks the receipt, its timeline with it
        assert len(moved.blocks) > 1
        arguments = ["moves", "show", moved.migration_id, "--url", fleet["A"].url, "--plot"]
        shown = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.png")])
        assert shown.exit_code == 0, shown.output
        assert moved.migration_id in shown.stdout
        assert (tmp_path / "out.png").read_bytes().startswith(PNG)
        refused = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.jpg")])
        assert refused.exit_code == 2
        assert "its name ends in .png" in refused.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["out.png"]
