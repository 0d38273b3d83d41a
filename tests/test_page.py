"""The control page: its layout, the two host-state slots, locks, and what is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.errors import ConflictError, FramingError, ManifestError, ValidationError
from worldmove.ipc import sealed_memfd
from worldmove.manifest import MAX_HOST_STATE
from worldmove.page.control import (
    HEADER_BYTES,
    NEVER,
    ControlPage,
    RankState,
    create_page,
    open_own,
    page_bytes,
)


@contextlib.contextmanager
def page(
    ranks: int = 2, host_state_bytes: int = 100, incarnation: int = 7, epoch: int = 3
) -> Iterator[ControlPage]:
    fd = create_page(ranks, host_state_bytes, incarnation=incarnation, epoch=epoch)
    made = ControlPage(fd)
    try:
        yield made
    finally:
        made.close()
        os.close(fd)


def raw(made: ControlPage) -> bytes:
    return bytes(made._raw)


def test_the_layout_is_the_documented_one() -> None:
    with page(ranks=2, host_state_bytes=5000) as made:
        made.pause_at = 77
        made.session_id = "wörld"
        made.publish(1, 42)
        made.set_marks(1, marks=True)
        made.set_state(1, RankState.STOPPED, now_ns=99)
        made.put_host_state(1, 42, b"even")
        made.put_host_state(1, 43, b"odd!!")
        made.set_revisions(1, 6)
        data = raw(made)
    words = struct.unpack_from("<8Q", data)
    stride = 4096 + 2 * 8192
    assert data[:8] == b"WMPAGE01"
    assert words[1:] == (1, 2, 5000, stride, 7, 3, 1)
    assert struct.unpack_from("<Q", data, 128) == (77,)
    assert struct.unpack_from("<Q", data, 256) == (6,)
    assert data[264:270] == "wörld".encode()
    base = 4096 + stride
    assert struct.unpack_from("<2Q", data, base) == (42 << 1, 1)
    assert struct.unpack_from("<2Q", data, base + 64) == (2, 99)
    assert struct.unpack_from("<4Q", data, base + 128) == (42, 4, 43, 5)
    assert struct.unpack_from("<Q", data, base + 192) == (6,)
    assert data[base + 4096 : base + 4100] == b"even"
    assert data[base + 4096 + 8192 : base + 4096 + 8197] == b"odd!!"
    assert len(data) == page_bytes(2, 5000) == 4096 + 2 * stride


def test_a_new_page_wants_no_pause_and_is_vacant() -> None:
    with page() as made:
        assert (made.incarnation, made.epoch, made.revision) == (7, 3, 1)
        assert made.pause_at == NEVER
        assert made.session_id is None
        for rank in range(2):
            assert (made.block(rank), made.writing(rank), made.marks(rank)) == (0, False, False)
            assert made.state(rank) is RankState.VACANT
            assert made.consistent(rank)
            assert not made.has_host_state(rank, 0)


def test_its_size_is_sealed() -> None:
    fd = create_page(1, 0, incarnation=1, epoch=1)
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


@given(st.lists(st.binary(max_size=64), min_size=2, max_size=30))
def test_the_slot_of_the_block_before_survives(states: list[bytes]) -> None:
    with page(ranks=1, host_state_bytes=64) as made:
        for block, state in enumerate(states):
            made.put_host_state(0, block, state)
            made.publish(0, block)
            assert made.host_state(0, block) == state
            if block:
                assert made.host_state(0, block - 1) == states[block - 1]
        with pytest.raises(ConflictError):
            made.host_state(0, len(states))


def test_a_host_state_too_long_changes_nothing() -> None:
    with page(host_state_bytes=4) as made:
        made.put_host_state(0, 2, b"good")
        before = raw(made)
        with pytest.raises(ManifestError, match="5 bytes"):
            made.put_host_state(0, 4, b"large")
        assert raw(made) == before


@pytest.mark.parametrize(
    ("state", "marks", "writing", "good"),
    [
        (RankState.VACANT, False, False, True),
        (RankState.STOPPED, False, True, True),
        (RankState.RUNNING, True, False, True),
        (RankState.RUNNING, True, True, False),
        (RankState.RUNNING, False, False, False),
    ],
)
def test_consistent(state: RankState, marks: bool, writing: bool, good: bool) -> None:
    with page() as made:
        made.set_state(1, state)
        made.set_marks(1, marks=marks)
        made.words[made.base(1)] = 5 << 1 | writing
        assert made.consistent(1) is good
        assert made.writing(1) is writing
        assert made.block(1) == 5


def test_values_of_the_other_side_are_bounded() -> None:
    with page(ranks=1, host_state_bytes=16) as made:
        made.put_host_state(0, 1, b"x")
        made.words[made.base(0) + 128 // 8 + 3] = NEVER  # a length that no slot has
        assert len(made.host_state(0, 1)) == 16
        made.words[made.base(0) + 64 // 8] = 12345
        assert made.state(0) is RankState.RUNNING
        made.words[256 // 8] = NEVER
        assert made.session_id is not None
        with pytest.raises(ValidationError):
            made.session_id = "x" * 257


@pytest.mark.parametrize(("ranks", "size"), [(0, 0), (65, 0), (1, -1), (1, MAX_HOST_STATE + 1)])
def test_sizes_out_of_range_make_no_page(ranks: int, size: int) -> None:
    with pytest.raises(ManifestError):
        create_page(ranks, size, incarnation=1, epoch=1)


@pytest.mark.parametrize("word", [0, 1, 2, 3, 4])
def test_what_contradicts_itself_is_refused(word: int) -> None:
    fd = create_page(2, 100, incarnation=1, epoch=1)
    os.pwrite(fd, struct.pack("<Q", (1 << 63) + 3), 8 * word)
    with pytest.raises(FramingError):
        ControlPage(fd)
    os.close(fd)


def test_another_size_is_refused() -> None:
    small = sealed_memfd("x", 100)
    with pytest.raises(FramingError, match="at least"):
        ControlPage(small)
    large = sealed_memfd("x", HEADER_BYTES)
    with pytest.raises(FramingError):
        ControlPage(large)
    os.close(small)
    os.close(large)


def test_a_living_process_occupies_its_rank() -> None:
    """The lock is the process's own: it goes with it, by whatever death."""
    with page() as made:
        code = (
            "import sys; from worldmove.page.control import *;"
            f"p = ControlPage(open_own({made._fd})); p.occupy(1);"
            "print('ready', flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[made._fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"ready\n"
        assert made.occupied(1)
        assert not made.occupied(0)
        own = open_own(made._fd)
        second = ControlPage(own)
        with pytest.raises(ConflictError):
            second.occupy(1)
        second.occupy(0)
        assert made.occupied(0)
        second.close()
        os.close(own)
        assert not made.occupied(0)
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()
        assert not made.occupied(1)


def test_a_rank_is_copied_whole_and_alone() -> None:
    with page() as old, page(incarnation=8) as new:
        old.publish(1, 9)
        old.put_host_state(1, 9, b"state")
        old.publish(0, 5)
        new.copy_rank(old, 1)
        assert (new.block(1), new.host_state(1, 9), new.block(0)) == (9, b"state", 0)
        with page(ranks=1) as other, pytest.raises(FramingError):
            new.copy_rank(other, 0)


def test_publishing_is_seen_by_another_mapping() -> None:
    with page() as made:
        other = ControlPage(made._fd)
        other.words[other.base(0)] = 3 << 1 | 1
        assert made.progress(0) == 7
        other.publish(0, 4)
        other.fence()
        assert made.progress(0) == 8
        other.close()
