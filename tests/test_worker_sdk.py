"""The SDK against a real node: what a serving stack sees, over REST, socket and page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import worldmove.sdk.memory as sdk_memory
from worldmove.errors import (
    ConflictError,
    ConnectionLostError,
    FingerprintMismatchError,
    ManifestError,
    NotFoundError,
    PeerError,
    SessionExistsError,
    ValidationError,
)
from worldmove.manifest import RAW_DTYPES, Region
from worldmove.sdk.tickets import Ticket, write_ticket
from worldmove.worker import SessionEndedError, Worker, World

REGIONS = [
    {"name": "k", "dtype": "bfloat16", "shape": [4, 6], "stride_bytes": 12},
    Region("index", "int64", (1,)),
    {"name": "fp8", "dtype": "float8_e4m3fn", "shape": (3,)},
]
TWO = [*REGIONS, {"name": "other", "dtype": "float32", "shape": [5], "rank": 1}]
TIMES = {"block_ms": 20, "horizon_ms": 50, "model": "m"}
PRINT = {"cpu": "x"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("n")
    run_dir = Path(tempfile.mkdtemp(prefix="wm-", dir="/tmp"))
    read, write = os.pipe()
    command = [sys.executable, "-m", "worldmove", "serve", "--name", "A", "--http", "127.0.0.1:0"]
    command += ["--ledger", f"sqlite:///{place}/ledger.db", "--run-dir", str(run_dir)]
    node = subprocess.Popen(
        [*command, "--ready-fd", str(write)], pass_fds=[write], stderr=subprocess.DEVNULL, cwd=place
    )
    os.close(write)
    with os.fdopen(read) as ready:
        address = ready.readline().strip()
    assert address
    yield address
    node.send_signal(signal.SIGTERM)
    assert node.wait(30) == 0
    shutil.rmtree(run_dir)


@pytest.fixture
def worker(url: str) -> Iterator[Worker]:
    with Worker(url) as worker:
        yield worker


@pytest.fixture
def world(worker: Worker, request: pytest.FixtureRequest) -> Iterator[World]:
    name = re.sub(r"[^a-z0-9_]", "-", request.node.name)
    world = worker.register(name, regions=REGIONS, fingerprint=PRINT, **TIMES)
    yield world
    world.close()
    worker.end(name)


def test_a_new_world_is_zero_and_written_in_place(world: World, worker: Worker) -> None:
    assert (world.epoch, world.block_number, world.host_state, world.rank) == (1, 0, b"", 0)
    k = world.tensor("k")
    assert (k.dtype, k.shape, k.any()) == (np.uint16, (4, 6), False)
    assert world.tensor("fp8").dtype == np.uint8
    address = k.ctypes.data
    for block in range(1, 4):
        with world.block():
            k += 1
        world.boundary(b"state")
        assert world.block_number == block
    assert (world.tensor("k") == 3).all()
    assert world.tensor("k").ctypes.data == address
    with pytest.raises(NotFoundError):
        world.tensor("nobody")
    assert [region.name for region in world.regions] == ["k", "index", "fp8"]


@pytest.mark.parametrize("state", [None, b"", b"x", bytearray(b"xy"), memoryview(b"xyz"), lambda: b"lazy"])
def test_every_kind_of_host_state(world: World, state: object) -> None:
    with world.block():
        pass
    world.boundary(state)  # type: ignore[arg-type]
    assert world.block_number == 1


def test_a_host_state_too_long_is_no_boundary(world: World) -> None:
    with pytest.raises(ManifestError):
        world.boundary(bytes(64 * 1024 + 1))
    assert world.block_number == 0
    world.boundary(bytes(64 * 1024))
    assert world.block_number == 1


def test_a_block_that_fails_stays_marked(world: World) -> None:
    page, rank = world._page, world._rank
    with contextlib.suppress(ZeroDivisionError), world.block():
        assert page.writing(rank)
        _ = 1 / 0
    assert page.writing(rank)
    with pytest.raises(ConflictError, match="inside block"):
        world.revise(drop=["index"])
    world.boundary(b"")
    assert not page.writing(rank)


def test_a_world_is_left_and_taken_up(worker: Worker) -> None:
    first = worker.register("left", regions=REGIONS, fingerprint=PRINT, **TIMES)
    with first.block():
        first.tensor("index")[0] = 77
    first.boundary(b"remember")
    kept = first.tensor("index")
    first.close()
    first.close()
    assert first.closed
    for use in (first.boundary, lambda: first.block().__enter__(), first.revise):
        with pytest.raises(ConflictError, match="closed"):
            use()
    assert kept[0] == 77  # a view that exists stays memory
    with pytest.raises(FingerprintMismatchError):
        worker.attach("left", fingerprint={"cpu": "y"})
    with pytest.raises(FingerprintMismatchError):
        worker.attach("left")
    second = worker.attach("left", fingerprint=PRINT)
    assert (second.block_number, second.host_state) == (1, b"remember")
    assert second.tensor("index")[0] == 77
    with pytest.raises(ConflictError):
        worker.attach("left", fingerprint=PRINT)
    worker.end("left")
    with pytest.raises(SessionEndedError):
        second.boundary(b"")
    assert second.closed
    with pytest.raises(NotFoundError):
        worker.attach("left", fingerprint=PRINT)


def test_ranks_join_with_tickets(worker: Worker, url: str) -> None:
    world = worker.register("ranks", regions=TWO, fingerprint=PRINT, **TIMES)
    (ticket,) = world.tickets
    assert "token" not in repr(Ticket("i", "s", 1, "secret"))
    with Worker(url) as other:
        with pytest.raises(ConflictError):
            other.join_standby(ticket)
        with pytest.raises(ValidationError):
            other.join("nonsense")
    worker.end("ranks")
    with pytest.raises(SessionEndedError):
        world.boundary()
    world = worker.register("ranks", regions=TWO, fingerprint=PRINT, rank=1, **TIMES)
    assert world.tensor("other").shape == (5,)
    with pytest.raises(NotFoundError):
        world.tensor("k")
    second = worker.join(world.tickets[0])
    assert (second.rank, second.epoch) == (0, 2)
    second.close()
    world.close()
    worker.end("ranks")


def test_a_standby_waits_and_goes(worker: Worker, url: str) -> None:
    standby = worker.standby(regions=TWO, fingerprint=PRINT, **TIMES)
    assert standby.tensor("k").shape == (4, 6)
    with Worker(url) as other, pytest.raises(ConflictError):
        other.join(standby.tickets[0])
    assert standby.wait(0.05) is None
    waiting = threading.Timer(0.1, standby._end)
    waiting.start()
    with pytest.raises(SessionEndedError):
        standby.wait()
    waiting.join()
    with pytest.raises(ConflictError):
        standby.wait()
    standby.close()
    again = worker.standby(regions=TWO, fingerprint=PRINT, **TIMES)
    again.close()
    with pytest.raises(NotFoundError):
        again._end()


def test_what_a_node_refuses_comes_as_its_error(worker: Worker, world: World) -> None:
    with pytest.raises(SessionExistsError):
        worker.register(world.id, regions=REGIONS, fingerprint=PRINT, **TIMES)
    shm = {"name": "s", "dtype": "uint8", "shape": [1], "source": {"kind": "shm", "name": "none-such"}}
    with pytest.raises(ManifestError) as caught:
        worker.register(regions=[shm], fingerprint=PRINT, **TIMES)
    assert caught.value.details["field"] == "regions[0].source.name"
    with pytest.raises(ManifestError):
        worker.register(regions=[{"name": "x"}], **TIMES)
    with pytest.raises(ManifestError):
        worker.register(regions=[*REGIONS, *REGIONS], **TIMES)
    with pytest.raises(ValidationError, match="rank"):
        worker.register("no-rank", regions=REGIONS, fingerprint=PRINT, rank=4, **TIMES)
    worker.end("no-rank")
    with pytest.raises(NotFoundError):
        worker.end("nobody/../../x")


def test_a_node_that_is_not_there() -> None:
    nowhere = write_ticket(Ticket("x", "/tmp/no-such-socket", 0, "x.y"))
    with Worker("http://127.0.0.1:9") as worker:
        with pytest.raises(PeerError):
            worker.register(regions=REGIONS, fingerprint=PRINT, **TIMES)
        with pytest.raises(ConnectionLostError):
            worker.join(nowhere)


def test_the_fingerprint_is_collected_if_left_out(worker: Worker) -> None:
    world = worker.register("printed", regions=REGIONS, **TIMES)
    world.close()
    again = worker.attach("printed")
    again.close()
    worker.end("printed")


def test_other_libraries(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for like in ("cupy", "jax"):
        with pytest.raises(ValidationError) as caught:
            world.tensor("k", like=like)
        assert caught.value.details["field"] == "like"

    class Tensor:
        """What a torch tensor does of it, without the two gigabytes."""

        def __init__(self, array: np.ndarray, kind: str = "") -> None:
            self.array, self.kind = array, kind

        def view(self, kind: str) -> Tensor:
            return Tensor(self.array, kind)

    class Torch:
        from_numpy = staticmethod(Tensor)
        bfloat16 = "torch.bfloat16"

    monkeypatch.setattr(sdk_memory.importlib, "import_module", lambda name: Torch)
    k = world.tensor("k", like="torch")
    assert (k.kind, k.array.dtype) == ("torch.bfloat16", np.int16)
    assert k.array.ctypes.data == world.tensor("k").ctypes.data
    assert world.tensor("index", like="torch").array.dtype == np.int64
    with pytest.raises(ValidationError):
        world.tensor("fp8", like="torch")
    assert "float8_e4m3fn" in RAW_DTYPES
