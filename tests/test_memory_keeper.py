"""The keeper as a real process: it holds memory through the death of everybody else, and no longer."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import stat
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from memory_kit import ended, holders, open_descriptors, pattern

from worldmove.errors import FencedError, NotFoundError, ProcessLostError, ValidationError
from worldmove.ipc import HEADER, MAGIC, close_all
from worldmove.memory.arena import create_arena
from worldmove.memory.keeper import GRACE_S
from worldmove.memory.keeping import LISTENING, Keeper

CLIENT = Path(__file__).with_name("memory_client.py")
PIPE = asyncio.subprocess.PIPE


@pytest.fixture
def path(run_dir: Path) -> Path:
    return run_dir / "keeper.sock"


@pytest.fixture
async def keeper(path: Path) -> AsyncIterator[Keeper]:
    keeper = await Keeper.start(path)
    yield keeper
    if not keeper.lost.done():
        for key in await keeper.keys():
            await keeper.drop(key)
    await keeper.close()


def mode(path: Path) -> int | None:
    """Permissions of a file, if it is there."""
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def inode(path: Path) -> int:
    """Which socket lies there."""
    return path.stat().st_ino


def arena(contents: bytes, name: str = "test-kept") -> int:
    fd = create_arena(len(contents), name)
    os.pwrite(fd, contents, 0)
    return fd


async def test_what_was_put_comes_back(keeper: Keeper) -> None:
    fds = [arena(b"one"), arena(b"three")]
    await keeper.put("world/1", b"\x00meta", fds)
    close_all(fds)
    meta, back = await keeper.get("world/1")
    assert meta == b"\x00meta"
    assert [os.pread(fd, 10, 0) for fd in back] == [b"one", b"three"]
    assert await keeper.keys() == ["world/1"]
    assert all(not os.get_inheritable(fd) for fd in back)
    close_all(back)


async def test_a_second_put_replaces_the_first(keeper: Keeper) -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    old, new = arena(b"old", name), arena(b"new")
    await keeper.put("k", b"1", [old])
    os.close(old)
    assert holders(name) == {keeper.pid}
    await keeper.put("k", b"2", [new])
    os.close(new)
    assert holders(name) == set()
    meta, back = await keeper.get("k")
    assert (meta, os.pread(back[0], 3, 0)) == (b"2", b"new")
    close_all(back)


async def test_dropping_gives_the_memory_back(keeper: Keeper) -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    fd = arena(b"x" * 100_000, name)
    await keeper.put("k", b"", [fd])
    os.close(fd)
    await keeper.drop("k")
    assert holders(name) == set()
    await keeper.drop("k")
    with pytest.raises(NotFoundError):
        await keeper.get("k")
    assert await keeper.keys() == []


async def test_limits(keeper: Keeper) -> None:
    fd = arena(b"x")
    await keeper.put("k" * 256, b"m" * (8 << 20), [fd] * 252)
    meta, back = await keeper.get("k" * 256)
    assert len(meta) == 8 << 20
    assert len(back) == 252
    close_all(back)
    await keeper.put("nothing", b"", [])
    assert await keeper.get("nothing") == (b"", [])
    for key, data, count in (
        ("", b"", 1),
        ("k" * 257, b"", 1),
        ("k", b"m" * ((8 << 20) + 1), 1),
        ("k", b"", 253),
    ):
        with pytest.raises(ValidationError):
            await keeper.put(key, data, [fd] * count)
    os.close(fd)


async def test_many_at_once_start_one(path: Path) -> None:
    keepers = await asyncio.gather(*(Keeper.start(path) for _ in range(6)))
    assert len({keeper.pid for keeper in keepers}) == 1
    assert os.getsid(keepers[0].pid) == keepers[0].pid != os.getsid(0)
    assert mode(path) == 0o600
    for keeper in keepers:
        await keeper.close()
    await ended(keepers[0].pid)
    assert mode(path) is None


async def test_memory_survives_whoever_made_it(path: Path) -> None:
    clients = [
        await asyncio.create_subprocess_exec(sys.executable, CLIENT, path, f"c{number}", "3", stdout=PIPE)
        for number in range(2)
    ]
    pids = set()
    for client in clients:
        assert client.stdout is not None
        pids.add(int(await client.stdout.readline()))
        client.kill()
        await client.wait()
    assert len(pids) == 1

    keeper = await Keeper.start(path)
    assert {keeper.pid} == pids
    assert await keeper.keys() == ["c0", "c1"]
    for key in ("c0", "c1"):
        assert holders(f"test-{key}") == {keeper.pid}
        meta, fds = await keeper.get(key)
        assert meta == f"meta of {key}".encode()
        assert [os.pread(fd, 100_000, 0) for fd in fds] == [pattern(100_000, number) for number in range(3)]
        assert all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) for fd in fds)
        await keeper.drop(key)
        close_all(fds)
        assert holders(f"test-{key}") == set()
    await keeper.close()
    await ended(keeper.pid)


async def test_it_holds_on_while_nobody_is_connected(path: Path) -> None:
    first = await Keeper.start(path)
    fd = arena(b"kept")
    await first.put("k", b"", [fd])
    os.close(fd)
    await first.close()
    with pytest.raises(TimeoutError):
        await ended(first.pid, 2.0)
    second = await Keeper.start(path)
    assert second.pid == first.pid
    _, back = await second.get("k")
    assert os.pread(back[0], 4, 0) == b"kept"
    close_all(back)
    await second.drop("k")
    await second.close()
    await ended(second.pid)


async def test_it_waits_longer_for_its_first_client(path: Path) -> None:
    """Whoever has started it on a busy machine finds it, and need not start another one."""
    starter = await asyncio.create_subprocess_exec(sys.executable, "-m", "worldmove.memory.keeper", str(path))
    assert await starter.wait() == LISTENING
    listening = inode(path)
    await asyncio.sleep(2 * GRACE_S)
    keeper = await Keeper.start(path)
    assert inode(path) == listening
    await keeper.close()
    await ended(keeper.pid)


async def test_a_keeper_that_nobody_can_reach_ends(run_dir: Path) -> None:
    home = run_dir / "home"
    home.mkdir()
    name = f"test-{uuid.uuid4().hex[:8]}"
    keeper = await Keeper.start(home / "k")
    fd = arena(b"x", name)
    await keeper.put("k", b"", [fd])
    os.close(fd)
    shutil.rmtree(home)
    assert await keeper.keys() == ["k"]
    await keeper.close()
    await ended(keeper.pid)
    assert holders(name) == set()


async def test_its_death_is_noticed(keeper: Keeper, path: Path) -> None:
    os.kill(keeper.pid, signal.SIGSTOP)
    pending = asyncio.create_task(keeper.keys())
    await asyncio.sleep(0)
    os.kill(keeper.pid, signal.SIGKILL)
    assert isinstance(await keeper.lost, ProcessLostError)
    with pytest.raises(ProcessLostError):
        await pending
    with pytest.raises(ProcessLostError):
        await keeper.drop("k")
    # Its socket is still there, and stale.
    assert mode(path) is not None
    fresh = await Keeper.start(path)
    assert fresh.pid != keeper.pid
    assert await fresh.keys() == []
    await fresh.close()
    await ended(fresh.pid)


async def test_it_cannot_be_started_where_no_directory_is(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessLostError):
        await Keeper.start(run_dir / "missing" / "k")
    assert "FileNotFoundError" in capfd.readouterr().err


async def test_a_path_too_long_for_a_socket_is_an_error_and_no_wait(run_dir: Path) -> None:
    with pytest.raises(ProcessLostError):
        await Keeper.start(run_dir / ("k" * 120))


async def test_cancelled_calls_leak_no_descriptor(keeper: Keeper) -> None:
    fd = arena(b"x")
    await keeper.put("k", b"m" * 200_000, [fd] * 100)
    os.close(fd)
    before = open_descriptors()
    for turns in range(12):
        task = asyncio.create_task(keeper.get("k"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            close_all((await task)[1])
        except asyncio.CancelledError:
            assert task.cancelled()
        # The answer to a later call comes after the one nobody waits for.
        assert await keeper.keys() == ["k"]
        assert open_descriptors() <= before


@pytest.mark.parametrize(
    "packet", [b"", b"junk", HEADER.pack(MAGIC, 0, 3) + b"abc", HEADER.pack(MAGIC, 1, 3)]
)
async def test_whoever_speaks_another_language_is_hung_up_on(
    keeper: Keeper, path: Path, packet: bytes
) -> None:
    fd = arena(b"x")
    await keeper.put("k", b"", [fd])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        sock.settimeout(10)
        socket.send_fds(sock, [packet or b"\0"], [fd] * 5)
        assert sock.recv(100) == b""
    os.close(fd)
    assert await keeper.keys() == ["k"]


ANOTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    print("kept out"); sys.exit()
sock.settimeout(10)
print("hung up" if sock.recv(100) == b"" else "served")
"""


def open_to_all(path: Path, allowed: int) -> None:
    path.parent.chmod(0o755)
    path.chmod(allowed)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_not_served(keeper: Keeper, path: Path) -> None:
    for allowed, expected in ((0o600, b"kept out"), (0o777, b"hung up")):
        open_to_all(path, allowed)
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", ANOTHER_USER, path, stdout=PIPE)
        said, _ = await other.communicate()
        assert said.strip() == expected


async def test_after_a_claim_only_the_claimant_changes_anything(run_dir: Path) -> None:
    path = run_dir / "keeper.sock"
    first = await Keeper.start(path, claim=True)
    plain = await Keeper.start(path)
    fd = create_arena(4096, "kept")
    try:
        await first.put("a", b"1", [fd])
        with pytest.raises(FencedError):
            await plain.put("a", b"2", [fd])
        second = await Keeper.start(path, claim=True)
        for former in (first, plain):
            with pytest.raises(FencedError):
                await former.put("a", b"2", [fd])
            with pytest.raises(FencedError):
                await former.drop("a")
        meta, fds = await first.get("a")
        close_all(fds)
        assert meta == b"1"
        await second.drop("a")
        assert await plain.keys() == []
    finally:
        os.close(fd)
        for keeper in (first, plain, second):
            await keeper.close()
