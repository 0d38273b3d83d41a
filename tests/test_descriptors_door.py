"""The door through which descriptors go from node to node: real sockets, real descriptors, rude callers."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from memory_kit import open_descriptors

from worldmove.descriptors import DescriptorDoor, Fetch, Handed, Refused, fetch
from worldmove.errors import ConnectionLostError, DeadlineError, FramingError, UnauthorizedError
from worldmove.ipc import HEADER, MAGIC, MAX_FDS, Channel, close_all, sealed_memfd

TOKEN, OTHER = bytes(range(32)), bytes(32)


@pytest_asyncio.fixture
async def door(tmp_path: Path) -> AsyncIterator[DescriptorDoor]:
    made = DescriptorDoor(tmp_path / "door.sock", timeout_ms=2000)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def memory() -> AsyncIterator[list[int]]:
    fds = [sealed_memfd(f"m{number}", 4096 * (number + 1)) for number in range(3)]
    yield fds  # type: ignore[misc]
    close_all(fds)


def same_files(mine: Sequence[int], theirs: Sequence[int]) -> bool:
    return [os.fstat(fd).st_ino for fd in mine] == [os.fstat(fd).st_ino for fd in theirs]


def let_in(path: Path, mode: int) -> None:
    path.chmod(mode)


async def test_the_same_memory_comes_out_in_order(door: DescriptorDoor, memory: list[int]) -> None:
    door.offer(TOKEN, memory)
    fds = await fetch(str(door.path), TOKEN, 3, 2000)
    assert same_files(memory, fds)
    assert not set(memory) & set(fds)
    assert not any(os.get_inheritable(fd) for fd in fds)
    close_all(fds)
    assert all(os.fstat(fd) for fd in memory)


@pytest.mark.parametrize("count", [0, 1, MAX_FDS, MAX_FDS + 1, 2 * MAX_FDS, 600])
async def test_any_number_of_extents(door: DescriptorDoor, memory: list[int], count: int) -> None:
    door.offer(TOKEN, [memory[number % 3] for number in range(count)])
    fds = await fetch(str(door.path), TOKEN, count, 5000)
    try:
        assert same_files([memory[number % 3] for number in range(count)], fds)
    finally:
        close_all(fds)


async def test_a_wrong_token_gets_nothing_and_the_right_one_still_counts(
    door: DescriptorDoor, memory: list[int]
) -> None:
    door.offer(TOKEN, memory)
    before = open_descriptors()
    for wrong in (OTHER, TOKEN[:-1], TOKEN + b"x", b""):
        with pytest.raises(UnauthorizedError):
            await fetch(str(door.path), wrong, 3, 2000)
    assert open_descriptors() <= before
    close_all(await fetch(str(door.path), TOKEN, 3, 2000))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_with_a_stolen_token_gets_nothing(memory: list[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="wm-", dir="/tmp") as name:
        let_in(Path(name), 0o711)
        door = DescriptorDoor(Path(name) / "door.sock", timeout_ms=5000)
        await door.start()
        let_in(door.path, 0o666)
        door.offer(TOKEN, memory)
        body = msgspec.msgpack.encode(Fetch(TOKEN))
        packet = HEADER.pack(MAGIC, 0, len(body)) + body
        code = (
            "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
            "s.send(bytes.fromhex(sys.argv[2])); data, fds, _, _ = socket.recv_fds(s, 1000, 9);"
            "print(len(fds), data)"
        )
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", code, str(door.path), packet.hex(), stdout=-1, cwd="/"
        )
        answer, _ = await stranger.communicate()
        assert answer.startswith(b"0 ")
        assert b"Refused" in answer
        close_all(await fetch(str(door.path), TOKEN, 3, 2000))
        await door.close()


async def test_a_token_works_once(door: DescriptorDoor, memory: list[int]) -> None:
    door.offer(TOKEN, memory)
    close_all(await fetch(str(door.path), TOKEN, 3, 2000))
    with pytest.raises(UnauthorizedError):
        await fetch(str(door.path), TOKEN, 3, 2000)


async def test_of_many_that_show_one_token_at_once_one_gets_in(
    door: DescriptorDoor, memory: list[int]
) -> None:
    door.offer(TOKEN, memory)
    tries = [fetch(str(door.path), TOKEN, 3, 2000) for _ in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    got = [result for result in results if isinstance(result, list)]
    assert len(got) == 1
    assert sum(isinstance(result, UnauthorizedError) for result in results) == 7
    close_all(got[0])


async def test_a_withdrawn_offer_is_gone(door: DescriptorDoor, memory: list[int]) -> None:
    door.offer(TOKEN, memory)
    door.offer(OTHER, memory[:1])
    door.withdraw(TOKEN)
    door.withdraw(TOKEN)
    with pytest.raises(UnauthorizedError):
        await fetch(str(door.path), TOKEN, 3, 2000)
    close_all(await fetch(str(door.path), OTHER, 1, 2000))


@pytest.mark.parametrize("count", [2, 4, 0, 300])
async def test_another_number_than_wanted_is_refused_and_closed(
    door: DescriptorDoor, memory: list[int], count: int
) -> None:
    door.offer(TOKEN, memory)
    before = open_descriptors()
    with pytest.raises(FramingError, match=f"the manifest needs {count}"):
        await fetch(str(door.path), TOKEN, count, 2000)
    assert open_descriptors() <= before


async def test_the_socket_is_for_this_user_only_and_goes_with_the_door(tmp_path: Path) -> None:
    path = tmp_path / "door.sock"
    path.write_text("left behind by a dead node")
    door = DescriptorDoor(path, timeout_ms=1000)
    await door.start()
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await door.close()
    assert not path.exists()
    await door.close()
    with pytest.raises(ConnectionLostError):
        await fetch(str(path), TOKEN, 1, 1000)


@pytest.mark.parametrize("path", ["/nonexistent/door.sock", "x" * 200, "a\0b", "\0abstract-nobody", ""])
async def test_nobody_there_is_a_lost_connection(path: str) -> None:
    with pytest.raises(ConnectionLostError):
        await fetch(path, TOKEN, 1, 1000)


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    return sock


RUDE = [
    b"x",
    b"not a message of ours at all",
    HEADER.pack(MAGIC, 0, 5) + b"short",
    HEADER.pack(MAGIC, 0, 1 << 30),
    HEADER.pack(MAGIC, 1, 10),
    HEADER.pack(MAGIC, 0, 1) + msgspec.msgpack.encode(7),
]


@pytest.mark.parametrize("packet", RUDE)
async def test_a_rude_caller_is_cut_off_and_the_door_goes_on(
    door: DescriptorDoor, memory: list[int], packet: bytes
) -> None:
    door.offer(TOKEN, memory)
    with connect(door.path) as rude:
        rude.send(packet)
        rude.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(rude, 100) == b""
    close_all(await fetch(str(door.path), TOKEN, 3, 2000))


async def test_descriptors_that_a_caller_sends_are_closed(door: DescriptorDoor, memory: list[int]) -> None:
    door.offer(TOKEN, memory)
    before = open_descriptors()
    channel: Channel[Handed | Refused] = Channel(connect(door.path), Handed | Refused)
    await channel.send(Fetch(OTHER), memory)
    answer, fds = await channel.receive()
    assert answer == Refused()
    assert fds == []
    channel.close()
    close_all(await fetch(str(door.path), TOKEN, 3, 2000))
    assert open_descriptors() <= before


async def test_a_caller_that_says_nothing_is_cut_off_in_time(tmp_path: Path, memory: list[int]) -> None:
    door = DescriptorDoor(tmp_path / "door.sock", timeout_ms=50)
    await door.start()
    door.offer(TOKEN, memory)
    with connect(door.path) as silent:
        silent.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(silent, 100) == b""
    close_all(await fetch(str(door.path), TOKEN, 3, 2000))
    await door.close()


async def test_a_closing_door_does_not_wait_for_its_callers(door: DescriptorDoor) -> None:
    with connect(door.path):
        await asyncio.sleep(0)
        await door.close()


@pytest.fixture
def liar(tmp_path: Path) -> AsyncIterator[socket.socket]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "liar.sock"))
    listener.listen(1)
    listener.setblocking(False)
    yield listener  # type: ignore[misc]
    listener.close()


async def lie(listener: socket.socket, answers: Sequence[tuple[Handed | Refused, Sequence[int]]]) -> None:
    """Answers one caller with anything, then waits until it hangs up."""
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    channel: Channel[Fetch] = Channel(sock, Fetch)
    try:
        await channel.receive()
        for message, fds in answers:
            await channel.send(message, fds)
        await channel.receive()
    except ConnectionLostError:
        return
    finally:
        channel.close()


async def test_a_source_that_does_not_answer_is_late(liar: socket.socket) -> None:
    lying = asyncio.ensure_future(lie(liar, []))
    before = open_descriptors()
    with pytest.raises(DeadlineError, match="within 60 ms"):
        await fetch(liar.getsockname(), TOKEN, 1, 60)
    await lying
    assert len(open_descriptors() - before) <= 1


async def test_what_came_before_a_deadline_is_closed(liar: socket.socket, memory: list[int]) -> None:
    before = open_descriptors()
    lying = asyncio.ensure_future(lie(liar, [(Handed(3, True), memory)]))
    with pytest.raises(DeadlineError):
        await fetch(liar.getsockname(), TOKEN, 5, 100)
    await lying
    assert open_descriptors() <= before


LIES = {
    "fewer than said": [(Handed(3, False), 2)],
    "more than said": [(Handed(1, False), 3)],
    "more and more": [(Handed(3, True), 3)] * 40,
    "nothing, for ever": [(Handed(0, True), 0)] * 40,
    "refused after all": [(Handed(2, True), 2), (Refused(), 0)],
}


@pytest.mark.parametrize("what", LIES)
async def test_a_lying_source_costs_nothing(liar: socket.socket, memory: list[int], what: str) -> None:
    before = open_descriptors()
    answers = [(message, memory[:count]) for message, count in LIES[what]]
    lying = asyncio.ensure_future(lie(liar, answers))
    with pytest.raises((FramingError, UnauthorizedError)):
        await fetch(liar.getsockname(), TOKEN, 5, 3000)
    await lying
    assert open_descriptors() <= before


async def test_a_cancelled_fetch_leaves_nothing(liar: socket.socket, memory: list[int]) -> None:
    before = open_descriptors()
    lying = asyncio.ensure_future(lie(liar, [(Handed(3, True), memory)]))
    fetching = asyncio.ensure_future(fetch(liar.getsockname(), TOKEN, 5, 60_000))
    for _ in range(20):
        await asyncio.sleep(0)
    fetching.cancel()
    await asyncio.wait({fetching, lying})
    assert fetching.cancelled()
    assert open_descriptors() <= before
