"""The film, its comparison with the twin's, the verdict, and the contact sheet."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from worldmove.demo import report, sheet
from worldmove.demo.film import BLOCK_BYTES, Film
from worldmove.demo.frames import BLOCK_FRAMES, FRAME_BYTES
from worldmove.demo.report import Move
from worldmove.errors import ValidationError
from worldmove.views import MigrationView, Receipt, RoundView

KEYS = [
    *("state", "from", "to", "rounds", "state_bytes", "sent_bytes", "pause_ms", "data_ms", "commit_ms"),
    *("resume_ms", "total_ms", "path", "source_root", "destination_root"),
]


def pictures(block: int) -> bytes:
    return bytes([block % 256]) * (BLOCK_BYTES - 1) + b"\0"


def filmed(plan: str, *, compare: bool = True) -> Film:
    """A film with one block per letter: the node that made it."""
    film = Film()
    for block, node in enumerate(plan, 1):
        film.add(block, node, pictures(block))
        if compare:
            film.compare(block, pictures(block))
    return film


def move(source: str = "A", destination: str = "B", **changes: object) -> Move:
    given = {
        "state": "released",
        "source": source,
        "destination": destination,
        "rounds": 2,
        "state_bytes": 256_051_264,
        "sent_bytes": 300_000_000,
        "pause_ms": 40.0,
        "data_ms": 30.0,
        "commit_ms": 5.0,
        "resume_ms": 5.0,
        "total_ms": 400.0,
        "path": "local",
        "source_root": "ab" * 32,
        "destination_root": "ab" * 32,
    }
    return Move(**{**given, **changes})


def test_a_good_demo_is_ok() -> None:
    with filmed("AABBA") as film:
        found, faults = report.outcome(film, [move(), move("B", "A")], 2)
    assert (found.ok, faults) == (True, [])
    assert found.frames_compared == found.frames_equal == 5 * BLOCK_FRAMES


def test_the_document_has_the_fields_of_the_contract() -> None:
    with filmed("AB") as film:
        found, _ = report.outcome(film, [move()], 1)
    document = msgspec.to_builtins(found)
    assert list(document) == ["ok", "frames_compared", "frames_equal", "moves"]
    assert list(document["moves"][0]) == KEYS
    assert isinstance(document["frames_equal"], int)


@pytest.mark.parametrize(
    ("moves", "asked", "words"),
    [
        ([move(destination_root="cd" * 32)], 1, "roots differ"),
        ([move(source_root=None, destination_root=None)], 1, "roots differ"),
        ([move(state="aborted")], 1, "ended as aborted"),
        ([move()], 2, "1 moves of 2"),
    ],
)
def test_a_bad_move_is_a_fault(moves: list[Move], asked: int, words: str) -> None:
    with filmed("AABB" if moves[0].moved else "AAAA") as film:
        found, faults = report.outcome(film, moves, asked)
    assert not found.ok
    assert any(words in fault for fault in faults)


def test_a_missing_block_is_a_fault() -> None:
    with Film() as film:
        for block, node in ((1, "A"), (3, "B")):
            film.add(block, node, pictures(block))
            film.compare(block, pictures(block))
        found, faults = report.outcome(film, [move()], 1)
    assert not found.ok
    assert faults == ["blocks [2] are missing"]


def test_a_block_that_comes_twice_is_a_fault_even_if_equal() -> None:
    with filmed("AB") as film:
        film.add(2, "A", pictures(2))
        found, faults = report.outcome(film, [move()], 1)
    assert not found.ok
    assert faults == ["blocks [2] were generated twice"]


def test_one_wrong_byte_is_one_unequal_frame() -> None:
    with filmed("AB", compare=False) as film:
        film.compare(1, pictures(1))
        wrong = bytearray(pictures(2))
        wrong[5 * FRAME_BYTES] ^= 1
        film.compare(2, bytes(wrong))
        found, faults = report.outcome(film, [move()], 1)
        assert [frame for frame in range(1, 25) if not film.equal(frame)] == [BLOCK_FRAMES + 6]
    assert not found.ok
    assert found.frames_equal == found.frames_compared - 1
    assert faults == ["1 frames differ from the twin's"]


def test_frames_that_were_not_compared_and_an_empty_film_are_faults() -> None:
    with filmed("AB", compare=False) as film:
        assert report.outcome(film, [move()], 1)[1] == ["0 frames of 24 were compared"]
    with Film() as film:
        assert not report.outcome(film, [], 0)[0].ok


def test_a_film_that_did_not_change_its_node_is_a_fault() -> None:
    with filmed("AAAA") as film:
        assert report.outcome(film, [move()], 1)[1] == ["the film has 1 stays for 1 moves"]


def test_film_keeps_pictures_by_number_in_any_order() -> None:
    with Film() as film:
        for block in (3, 1, 2):
            film.add(block, "A", pictures(block))
        assert [int(film.picture(block * BLOCK_FRAMES)[0, 0, 0]) for block in (1, 2, 3)] == [1, 2, 3]
        assert film.stays() == [("A", 1, 36)]
        assert (film.last, film.missing, film.frames) == (3, [], 36)


@pytest.mark.parametrize(("block", "size"), [(0, BLOCK_BYTES), (1, BLOCK_BYTES - 1), (1, 0)])
def test_film_refuses_what_is_no_block(block: int, size: int) -> None:
    with Film() as film, pytest.raises(ValidationError, match="are allowed"):
        film.add(block, "A", bytes(size))


def test_a_move_is_read_from_its_receipt_or_without_one() -> None:
    receipt = Receipt(
        migration_id="m", session_id="s", source="A", destination="B", state="released", path="staged",
        live=True, epoch=2, block=9, state_bytes=10, sent_bytes=25, kept_bytes=0,
        rounds=tuple(RoundView(number=n, final=n == 2, leaves=1, bytes=5, ms=1.0) for n in (1, 2)),
        damaged=(), source_root="aa", destination_root="aa", pause_ms=4.0, data_ms=2.0, commit_ms=1.0,
        resume_ms=1.0, total_ms=50.0, missed=False, lanes=1, finished_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    view = MigrationView(
        id="m", session_id="s", source="A", destination="B", state="released", live=True, path="staged",
        round=2, state_bytes=10, sent_bytes=25, created_at="2026-01-01T00:00:00Z", elapsed_ms=60.0,
        receipt=receipt,
    )  # fmt: skip
    moved = Move.of(view)
    assert (moved.rounds, moved.sent_bytes, moved.total_ms, moved.exact, moved.moved) == (
        2,
        25,
        50.0,
        True,
        True,
    )
    bare = Move.of(msgspec.structs.replace(view, receipt=None, state="rejected"))
    assert (bare.rounds, bare.pause_ms, bare.total_ms, bare.exact, bare.moved) == (
        0,
        None,
        60.0,
        False,
        False,
    )


def test_the_table_shows_every_move_on_a_narrow_terminal() -> None:
    out = io.StringIO()
    many = [move(total_ms=12345.6, path="staged"), move("B", "A", state="aborted", pause_ms=None)]
    Console(file=out, width=80).print(report.table(many))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert max(len(line.rstrip()) for line in lines) <= 80
    for word in ("A→B", "released", "staged", "300.0", "40.0", "12345.6", "abababab"):
        assert word in lines[2]
    assert "aborted" in lines[3]


@given(first=st.integers(1, 10_000), frames=st.integers(0, 10_000), count=st.integers(1, 12))
def test_picked_frames_are_ordered_and_hold_both_ends(first: int, frames: int, count: int) -> None:
    last = first + frames
    found = sheet.pick(first, last, count)
    assert found == sorted(set(found))
    assert len(found) == min(count, frames + 1)
    assert found[0] == first
    assert count == 1 or found[-1] == last


def test_the_contact_sheet_shows_the_film_and_the_moves(tmp_path) -> None:
    with filmed("AAABBBAA") as film:
        moves = [move(), move("B", "A", state="aborted"), move("B", "A", destination_root="00")]
        drawn = report.contact_sheet(film, moves, "verdict", True)
        drawn.save(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as read:
        pixels = np.asarray(read)
        assert read.size == drawn.size
    assert drawn.width > 1200
    assert (pixels == sheet._GOOD).all(axis=-1).any()
    assert (pixels == sheet._BAD).all(axis=-1).any(), "a pair of roots that differs must be seen"


def test_a_sheet_of_many_stays_stays_readable() -> None:
    plan = "".join("AB"[index % 2] for index in range(60))
    with filmed(plan) as film:
        many = report.contact_sheet(film, [move() for _ in range(59)], "verdict", True)
        few = report.contact_sheet(film, [], "verdict", False)
    assert many.height < 3000
    assert few.width == many.width
