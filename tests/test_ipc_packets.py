"""Packets that are not as they say: each is refused for what is wrong with it, before its body is read."""

from __future__ import annotations

import array
import asyncio
import os
import resource
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
from memory_kit import open_descriptors
from starve_kit import limited, next_descriptor

from worldmove.errors import ConnectionLostError, FramingError, WorldMoveError
from worldmove.ipc import (
    HEADER,
    MAGIC,
    MAX_BODY,
    MAX_PACKET,
    SPILLED,
    Channel,
    SyncChannel,
    close_all,
    socketpair,
)


class Word(msgspec.Struct):
    text: bytes


BODY = msgspec.msgpack.encode(Word(b"x" * 40))


async def test_who_listens_hears_everything_at_once_and_why_it_ends() -> None:
    mine, its = socketpair()
    speaking: SyncChannel[Word] = SyncChannel(mine, Word)
    channel: Channel[Word] = Channel(its, Word)
    heard: list[tuple[bytes, int]] = []
    ended: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
    reader, writer = os.pipe()
    for number in range(3):
        speaking.send(Word(b"%d" % number), [reader] * number)

    def hear(word: Word, fds: list[int]) -> None:
        heard.append((word.text, len(fds)))
        close_all(fds)

    channel.listen(hear, ended.set_result)
    speaking.close()
    assert isinstance(await ended, ConnectionLostError)
    assert heard == [(b"0", 0), (b"1", 1), (b"2", 2)]
    channel.close()
    close_all([reader, writer])


async def test_a_channel_that_was_closed_tells_its_listener_nothing_more() -> None:
    mine, its = socketpair()
    speaking: SyncChannel[Word] = SyncChannel(mine, Word)
    channel: Channel[Word] = Channel(its, Word)
    first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def hear(word: Word, _fds: list[int]) -> None:
        first.set_result(word.text)
        channel.close()

    ended: list[WorldMoveError] = []
    channel.listen(hear, ended.append)
    speaking.send(Word(b"one"))
    speaking.send(Word(b"two"))
    assert await first == b"one"
    await asyncio.sleep(0)
    assert ended == []
    speaking.close()


async def test_a_listener_that_refuses_a_message_hears_no_other() -> None:
    mine, its = socketpair()
    speaking: SyncChannel[Word] = SyncChannel(mine, Word)
    channel: Channel[Word] = Channel(its, Word)
    ended: asyncio.Future[WorldMoveError] = asyncio.get_running_loop().create_future()
    heard: list[bytes] = []

    def hear(word: Word, _fds: list[int]) -> None:
        heard.append(word.text)
        raise FramingError("out of turn")

    channel.listen(hear, ended.set_result)
    for text in (b"one", b"two"):
        speaking.send(Word(text))
    assert (await ended).message == "out of turn"
    assert heard == [b"one"]
    channel.close()
    speaking.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, SyncChannel[Word]]]:
    mine, its = socketpair()
    channel: SyncChannel[Word] = SyncChannel(its, Word)
    yield mine, channel
    mine.close()
    channel.close()


def send(sock: socket.socket, packet: bytes, fds: tuple[int, ...] = ()) -> None:
    carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], carried)
    for fd in fds:
        os.close(fd)


def head(length: int, flags: int = 0) -> bytes:
    return HEADER.pack(MAGIC, flags, length)


LONGEST = msgspec.msgpack.encode(
    Word(bytes(MAX_PACKET - len(msgspec.msgpack.encode(Word(bytes(70_000)))) + 70_000))
)


@pytest.mark.parametrize(
    ("packet", "wrong"),
    [
        (head(len(BODY) - 1) + BODY, "announces"),
        (head(len(BODY) + 1) + BODY, "announces"),
        (head(len(BODY)) + BODY + b"\0", "announces"),
        (head(len(BODY))[:-1], "shorter than its header"),
        (b"\x7f", "shorter than its header"),
        (head(len(LONGEST)) + LONGEST + b"\0", "truncated"),
        (head(MAX_BODY + 1) + BODY, "length"),
        (head(len(BODY), 2) + BODY, "flag"),
        (HEADER.pack(MAGIC ^ 1, 0, len(BODY)) + BODY, "magic"),
        (head(len(BODY), SPILLED), "without its descriptor"),
    ],
)
def test_a_packet_of_another_length_than_it_says(
    ends: tuple[socket.socket, SyncChannel[Word]], packet: bytes, wrong: str
) -> None:
    sock, channel = ends
    send(sock, packet)
    with pytest.raises(FramingError, match=wrong):
        channel.receive(timeout=5)
    send(sock, head(len(BODY)) + BODY)
    assert channel.receive(timeout=5) == (Word(b"x" * 40), [])


def memory(content: bytes, size: int | None = None) -> int:
    fd = os.memfd_create("test-spill", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.ftruncate(fd, len(content) if size is None else size)
    return fd


def pipe() -> int:
    reading, writing = os.pipe()
    os.write(writing, BODY)
    os.close(writing)
    return reading


def plain_file() -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, BODY)
    return fd


@pytest.mark.parametrize(
    ("spill", "length", "wrong"),
    [
        (lambda: memory(BODY), len(BODY) - 1, "another length"),
        (lambda: memory(BODY), len(BODY) + 1, "another length"),
        (lambda: memory(BODY + b"\0"), len(BODY), "another length"),
        (lambda: memory(BODY, MAX_BODY + 1), MAX_BODY + 1, "unknown magic, flag or length"),
        (pipe, len(BODY), "can't be read"),
        (plain_file, len(BODY), "can't be read"),
    ],
)
def test_a_body_beside_its_packet(
    ends: tuple[socket.socket, SyncChannel[Word]], spill: Callable[[], int], length: int, wrong: str
) -> None:
    """Memory of the announced length, or nothing; its descriptor is closed either way."""
    sock, channel = ends
    before = open_descriptors()
    send(sock, head(length, SPILLED), (spill(),))
    with pytest.raises(FramingError, match=wrong):
        channel.receive(timeout=5)
    send(sock, head(len(BODY), SPILLED), (memory(BODY),))
    assert channel.receive(timeout=5) == (Word(b"x" * 40), [])
    assert open_descriptors() <= before


def test_descriptors_for_which_there_is_no_room_are_told_of(
    ends: tuple[socket.socket, SyncChannel[Word]],
) -> None:
    """A message without all of its descriptors is no message."""
    sock, channel = ends
    send(sock, head(len(BODY)) + BODY, (memory(b""), memory(b"")))
    me = os.getpid()
    with (
        limited(me, resource.RLIMIT_NOFILE, next_descriptor(me)),
        pytest.raises(FramingError, match="descriptors were truncated"),
    ):
        channel.receive(timeout=5)
