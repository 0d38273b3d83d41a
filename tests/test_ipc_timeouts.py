"""A time-out of one call on a packet socket is over with that call."""

from __future__ import annotations

import contextlib
import socket
import threading

import msgspec
import pytest

from worldmove.errors import ConnectionLostError
from worldmove.ipc import MAX_PACKET, SyncChannel, socketpair


class Word(msgspec.Struct):
    text: bytes


def channels() -> tuple[SyncChannel[Word], SyncChannel[Word]]:
    mine, theirs = socketpair()
    return SyncChannel(mine, Word), SyncChannel(theirs, Word)


def test_the_last_words_of_a_side_that_has_not_read_everything_are_heard() -> None:
    one, other = channels()
    one.send(Word(b"unread"))
    other.send(Word(b"farewell"))
    other.close()
    assert one.receive() == (Word(b"farewell"), [])
    with pytest.raises(ConnectionLostError):
        one.receive()
    one.close()


@pytest.mark.parametrize("timeout", [0, 0.01, 0.5])
def test_a_look_after_a_timed_receive_does_not_wait(timeout: float) -> None:
    mine, theirs = socketpair()
    channel: SyncChannel[Word] = SyncChannel(mine, Word)
    try:
        if timeout < 0.5:
            assert channel.receive(timeout=timeout) is None
        else:
            SyncChannel(theirs, Word).send(Word(b"x"))
            assert channel.receive(timeout=timeout) is not None
        with pytest.raises(BlockingIOError):
            mine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    finally:
        channel.close()
        theirs.close()


def test_a_send_after_a_receive_without_waiting_waits_for_room() -> None:
    mine, theirs = channels()
    assert mine.receive(timeout=0) is None
    heard = []

    def drain() -> None:
        with contextlib.suppress(ConnectionLostError):
            while True:
                heard.append(theirs.receive())

    reader = threading.Thread(target=drain)
    for _ in range(2):
        mine.send(Word(bytes(MAX_PACKET // 2)))
    reader.start()
    for _ in range(50):
        mine.send(Word(bytes(MAX_PACKET // 2)))
    mine.close()
    reader.join()
    theirs.close()
    assert len(heard) == 52


def test_a_closed_channel_is_a_lost_connection() -> None:
    mine, theirs = channels()
    mine.close()
    theirs.close()
    with pytest.raises(ConnectionLostError):
        mine.receive(timeout=0)
