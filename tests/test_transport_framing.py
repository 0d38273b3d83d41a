"""Wire formats, the cutting of pulls into messages, and the check of spans against a region table."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.errors import ConfigError, FramingError
from worldmove.manifest import Span
from worldmove.transport import framing
from worldmove.transport.faults import Faults, lane_faults
from worldmove.transport.framing import BOUNCE, CHUNK, GATHER, Kind
from worldmove.transport.lane_messages import Connect, Serve
from worldmove.transport.table import LaneRegion, RegionTable

TOKEN = bytes(range(32))
LENGTHS = st.one_of(
    st.integers(1, 300),
    st.integers(1, 3 * CHUNK),
    st.sampled_from([GATHER - 1, GATHER, GATHER + 1, BOUNCE, BOUNCE + 1, CHUNK - 1, CHUNK, CHUNK + 1]),
)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 40), LENGTHS), min_size=1, max_size=40))
def test_a_plan_covers_every_byte_once_in_bounded_messages(spans: list[tuple[int, int, int]]) -> None:
    packed = framing.pack_spans([Span(*span) for span in spans])
    chunks = list(framing.plan(packed))
    wanted, got = [], []
    for region, offset, length in spans:
        wanted.append((region, offset, offset + length))
    for chunk in chunks:
        assert chunk.nbytes == sum(piece.length for piece in chunk.pieces)
        assert 0 < chunk.nbytes <= (CHUNK if len(chunk.pieces) == 1 else BOUNCE)
        got += [(piece.region, piece.offset, piece.offset + piece.length) for piece in chunk.pieces]
    assert _merged(got, wanted) == sorted(wanted)
    assert list(framing.plan(framing.unpack_spans(packed.tobytes()))) == chunks


def _merged(
    pieces: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Joins pieces that continue each other, back to the spans they were cut from."""
    left = sorted(pieces)
    spans = []
    for region, start, stop in sorted(wanted):
        position = start
        while position < stop:
            piece = next(p for p in left if p[0] == region and p[1] == position and p[2] <= stop)
            left.remove(piece)
            position = piece[2]
        spans.append((region, start, stop))
    assert not left
    return spans


def test_small_spans_share_messages() -> None:
    spans = framing.pack_spans([Span(number, 0, 100) for number in range(4000)])
    assert [len(chunk.pieces) for chunk in framing.plan(spans)] == [4000]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([Span(0, 0, 0)], "empty"),
        ([Span(0, 0, -1)], "fit"),
        ([Span(-1, 0, 1)], "fit"),
        ([Span(0, -1, 1)], "fit"),
        ([Span(1 << 32, 0, 1)], "fit"),
        ([Span(0, 1 << 64, 1)], "fit"),
        ([Span(0, 0, framing.MAX_PULL_BYTES + 1)], "more than"),
        ([Span(0, 0, framing.MAX_PULL_BYTES)] * 2, "more than"),
        ([Span(0, 0, 1 << 63)] * 2, "more than"),  # in 64 bits they come to nothing
        ([Span(0, 0, (1 << 64) - 1)] * 2, "more than"),
        ([Span(0, 0, 1)] * (framing.MAX_SPANS + 1), "spans"),
    ],
)
def test_impossible_pulls_are_not_packed(spans: list[Span], reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        framing.pack_spans(spans)


@pytest.mark.parametrize(
    "body", [b"", b"x" * 19, b"x" * 21, bytes(20), b"x" * (20 * (framing.MAX_SPANS + 1))]
)
def test_impossible_pulls_are_not_read(body: bytes) -> None:
    with pytest.raises(FramingError):
        framing.unpack_spans(body)


def test_a_pull_is_documented_bytes() -> None:
    assert framing.pack_spans([Span(7, 9, 11)]).tobytes() == struct.pack("<IQQ", 7, 9, 11)


def test_openings_prove_the_token_for_one_direction_move_and_table() -> None:
    table = os.urandom(16)
    process = framing.ProcessId(1 << 22, 1 << 63, 4_026_531_836)
    hello = framing.opening(Kind.HELLO, TOKEN, "m-1", table, process)
    assert framing.check_opening(hello, Kind.HELLO, TOKEN, "m-1") == (table, process)
    assert TOKEN not in hello
    wrong = [
        (hello, Kind.WELCOME, TOKEN, "m-1"),
        (hello, Kind.HELLO, TOKEN[::-1], "m-1"),
        (hello, Kind.HELLO, TOKEN, "m-2"),
        (hello[:-1], Kind.HELLO, TOKEN, "m-1"),
        (hello[:8] + bytes(16) + hello[24:], Kind.HELLO, TOKEN, "m-1"),
        (hello[:24] + bytes(4) + hello[28:], Kind.HELLO, TOKEN, "m-1"),
        (b"\0" + hello[1:], Kind.HELLO, TOKEN, "m-1"),
        (hello[:4] + struct.pack("<H", framing.VERSION + 1) + hello[6:], Kind.HELLO, TOKEN, "m-1"),
    ]
    for body, kind, token, move_id in wrong:
        with pytest.raises(FramingError):
            framing.check_opening(body, kind, token, move_id)


@given(st.sampled_from(list(Kind)), st.integers(0, 1 << 20))
def test_tags_carry_kind_and_place(kind: Kind, sequence: int) -> None:
    tag = framing.tag_of(kind, sequence)
    assert framing.read_tag(tag, 0, sequence) is kind
    for other in (sequence + 1, sequence - 1):
        with pytest.raises(FramingError, match="due"):
            framing.read_tag(tag, 0, other)
    with pytest.raises(FramingError, match="at most"):
        framing.read_tag(tag, framing.LIMITS[kind] + 1, sequence)


@pytest.mark.parametrize("kind", [0, 9, 15])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(FramingError, match="unknown"):
        framing.read_tag(kind << 12, 0, 0)


@pytest.mark.parametrize("token", [b"", b"x" * 15, b"x" * 65])
def test_tokens_have_a_length(token: bytes) -> None:
    with pytest.raises(FramingError, match="token"):
        framing.check_token(token)


def test_tokens_are_not_shown() -> None:
    for message in (Serve(TOKEN), Connect("h", 1, TOKEN, 1.0)):
        assert repr(TOKEN)[2:20] not in repr(message)


REGIONS = [LaneRegion(0, 0, 100), LaneRegion(1, 512, 1), LaneRegion(0, 512, 0), LaneRegion(1, 0, 512)]


def table() -> RegionTable:
    return RegionTable([memoryview(bytearray(1024)), memoryview(bytearray(1024))], REGIONS)


@pytest.mark.parametrize("span", [Span(0, 0, 100), Span(0, 99, 1), Span(1, 0, 1), Span(3, 511, 1)])
def test_spans_inside_their_region_pass(span: Span) -> None:
    table().check(framing.pack_spans([span]))


@pytest.mark.parametrize(
    "span",
    [
        Span(4, 0, 1),
        Span(0xFFFF_FFFF, 0, 1),
        Span(0, 0, 101),
        Span(0, 100, 1),
        Span(1, 1, 1),
        Span(2, 0, 1),
        Span(0, (1 << 64) - 1, 2),
        Span(0, 1 << 63, 1 << 20),
    ],
)
def test_spans_outside_their_region_are_named(span: Span) -> None:
    with pytest.raises(FramingError, match="span"):
        table().check(framing.pack_spans([Span(0, 0, 1), span]))


@pytest.mark.parametrize(
    "region", [(2, 0, 1), (-1, 0, 1), (0, 0, 1025), (0, 1024, 1), (0, -1, 1), (0, 0, -1)]
)
def test_regions_lie_inside_their_extents(region: tuple[int, int, int]) -> None:
    with pytest.raises(FramingError, match="region 0"):
        RegionTable([memoryview(bytearray(1024))] * 2, [LaneRegion(*region)])


def test_the_digest_depends_on_sizes_and_order_only() -> None:
    moved = [LaneRegion(0, 100, 100), LaneRegion(0, 0, 1), LaneRegion(0, 0, 0), LaneRegion(0, 300, 512)]
    assert RegionTable([memoryview(bytearray(1024))], moved).digest == table().digest
    assert RegionTable([memoryview(bytearray(1024))], moved[::-1]).digest != table().digest


def test_gather_and_scatter_are_inverse() -> None:
    one, other = table(), table()
    one.view(Span(0, 0, 100))[:] = os.urandom(100)
    one.view(Span(3, 0, 512))[:] = os.urandom(512)
    spans = framing.pack_spans([Span(3, 500, 12), Span(0, 0, 1), Span(0, 50, 50), Span(1, 0, 1)])
    (chunk,) = framing.plan(spans)
    packed = one.gather(chunk, memoryview(bytearray(BOUNCE)))
    assert packed.nbytes == 64
    other.scatter(chunk, packed)
    for piece in chunk.pieces:
        assert other.view(piece) == one.view(piece)
    assert other.view(Span(3, 0, 500)) == bytes(500)


def test_fault_names_are_checked() -> None:
    assert lane_faults("") == ()
    assert lane_faults("ledger-cut, lane-flip-once ,lane-stall") == ("lane-flip-once", "lane-stall")
    with pytest.raises(ConfigError, match="lane-flop"):
        lane_faults("lane-flop")


def test_faults_never_touch_what_they_damage() -> None:
    data = memoryview(np.arange(100, dtype=np.uint8).data).cast("B")
    before = bytes(data)
    once, always, short = (
        Faults([name]) for name in ("lane-flip-once", "lane-flip-always", "lane-short-once")
    )
    assert [bytes(once.damage(data)) == before for _ in range(3)] == [False, True, True]
    assert [bytes(always.damage(data)) == before for _ in range(3)] == [False, False, False]
    assert [short.damage(data).nbytes for _ in range(3)] == [99, 100, 100]
    assert Faults().damage(data) is data
    assert bytes(data) == before
