"""A serving stack for tools/gpu_devices.py: a world on several devices, told what to do line by line.

    python tools/gpu_worlds.py URL PARENT

Reads one JSON object a line, `{"do": …}`, and answers with one. What a region holds in a block is a pure
function of its name and the block, so that whoever has the world can say of every byte whether it is right.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupy
import numpy as np

from worldmove.bench.gpu_actor import BLOCKS, CODE, POISON, THREADS
from worldmove.cuda.driver import Current, bindings, call, find
from worldmove.cuda.memory import Device
from worldmove.errors import SessionMoved, WorldMoveError
from worldmove.executor.serving import end_with_parent
from worldmove.manifest import HOST, Region
from worldmove.worker import Standby, Worker, World, own_region

MODEL = "worldmove-gpu-devices"
BLOCK_MS = 5.0
HORIZON_MS = 60_000.0
WAIT_S = 0.2
KINDS = {"plain": "cuMemAlloc", "managed": "cuMemAllocManaged", "pool": "cuMemAllocAsync"}


def seed(region: str, version: int) -> np.uint64:
    """What the words of a region are made of."""
    return np.uint64(zlib.crc32(region.encode()) << 32 | version)


def words(count: int, start: np.uint64) -> np.ndarray:
    """The same words as the kernels of `bench.gpu_actor` write."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def made(regions: list[dict[str, Any]]) -> list[Region]:
    """As they come in a line."""
    return [Region(**{**each, "shape": tuple(each["shape"])}) for each in regions]


class Stack:
    """The commands, each a method that takes the rest of its line and returns the rest of the answer."""

    def __init__(self, url: str) -> None:
        self._worker = Worker(url)
        self._kernels: dict[int, tuple[Any, Any]] = {}
        self._world: World | None = None
        self._standby: Standby | None = None
        self._regions: list[Region] = []
        self._version = 0
        self._blocks: dict[str, Any] = {}
        self._hogs: list[int] = []
        self._gpus: dict[str, Device] = {}
        # Before anything is registered: what a process has compiled is part of its fingerprint.
        self._kernel(0)[0]((1,), (1,), (cupy.zeros(1, dtype=cupy.uint64), np.uint64(1), np.uint64(0)))

    # Memory

    def _kernel(self, ordinal: int) -> tuple[Any, Any]:
        if ordinal not in self._kernels:
            module = cupy.RawModule(code=CODE)
            self._kernels[ordinal] = module.get_function("write_words"), module.get_function("compare_words")
        return self._kernels[ordinal]

    def _write(self, version: int) -> None:
        holder = self._world or self._standby
        for region in self._regions:
            view = holder.tensor(region.name)
            if region.device == HOST:
                raw = view.reshape(-1).view(np.uint64)
                raw[:] = words(raw.size, seed(region.name, version))
                continue
            with cupy.cuda.Device(view.ordinal):
                data, count = cupy.asarray(view), np.uint64(region.nbytes // 8)
                self._kernel(view.ordinal)[0](
                    (BLOCKS,), (THREADS,), (data, count, seed(region.name, version))
                )
        self._version = version

    def _wrong(self, version: int) -> dict[str, int]:
        """Bytes of each region that are not those of a version; empty where all are right."""
        found = {}
        for region in self._regions:
            view = self._world.tensor(region.name)
            if region.device == HOST:
                raw = view.reshape(-1).view(np.uint8)
                expected = words(raw.size // 8, seed(region.name, version)).view(np.uint8)
                wrong = int(np.count_nonzero(raw != expected))
            else:
                with cupy.cuda.Device(view.ordinal):
                    total = cupy.zeros(1, dtype=cupy.uint64)
                    data, count = cupy.asarray(view), np.uint64(region.nbytes // 8)
                    arguments = (data, count, seed(region.name, version), total)
                    self._kernel(view.ordinal)[1]((BLOCKS,), (THREADS,), arguments)
                    wrong = int(total[0])
            if wrong:
                found[region.name] = wrong
        return found

    def _poison(self) -> None:
        for region in self._regions:
            view = self._standby.tensor(region.name)
            if region.device == HOST:
                view.reshape(-1).view(np.uint8)[:] = POISON
                continue
            with cupy.cuda.Device(view.ordinal):
                cupy.cuda.runtime.memset(view.address, POISON, region.nbytes)
                cupy.cuda.get_current_stream().synchronize()

    def _allocate(self, device: str, nbytes: int, kind: str) -> int:
        driver = bindings()
        ordinal = find(device).ordinal
        context = call(driver, "cuDevicePrimaryCtxRetain", call(driver, "cuDeviceGet", ordinal))
        more = {"plain": (), "managed": (1,), "pool": (driver.CUstream(0),)}[kind]
        with Current(driver, context):
            return int(call(driver, KINDS[kind], nbytes, *more))

    # Commands

    def register(self, id: str, regions: list[dict[str, Any]], own: str = "") -> dict[str, Any]:  # noqa: A002
        """Registers a world and writes block 0 of rank 0; what lies on `own` is this process's memory."""
        described = made(regions)
        self._regions = [region for region in described if not region.rank]
        mine = [region for region in self._regions if own and region.device == own]
        memory = {}
        at = 256
        base = self._allocate(own, sum(each.nbytes + 256 for each in mine) + 4096, "plain") if mine else 0
        for region in mine:
            face = {"shape": (region.nbytes,), "typestr": "|u1", "data": (base + at, False), "version": 3}
            memory[region.name] = SimpleNamespace(__cuda_array_interface__=face)
            at += region.nbytes + 256
        self._world = self._worker.register(
            id, model=MODEL, regions=described, block_ms=BLOCK_MS, horizon_ms=HORIZON_MS, memory=memory
        )
        self._write(0)
        offset = base and self._world.regions[-1].source.offset
        return {"epoch": self._world.epoch, "offset": offset, "tickets": self._world.tickets}

    def join(self, ticket: str, regions: list[dict[str, Any]]) -> dict[str, Any]:
        """Takes another rank, which has these regions, and writes its block 0."""
        self._regions = made(regions)
        self._world = self._worker.join(ticket)
        self._write(0)
        return {"rank": self._world.rank}

    def standby(self, regions: list[dict[str, Any]]) -> dict[str, Any]:
        """Stands by for rank 0, in poisoned memory."""
        described = made(regions)
        self._regions = [region for region in described if not region.rank]
        self._standby = self._worker.standby(
            model=MODEL, regions=described, block_ms=BLOCK_MS, horizon_ms=HORIZON_MS
        )
        self._poison()
        return {"id": self._standby.id, "tickets": self._standby.tickets}

    def join_standby(self, ticket: str, regions: list[dict[str, Any]]) -> dict[str, Any]:
        """Stands by for another rank, which has these regions, in poisoned memory."""
        self._regions = made(regions)
        self._standby = self._worker.join_standby(ticket)
        self._poison()
        return {"id": self._standby.id}

    def wait(self) -> dict[str, Any]:
        """Waits for a world, or for the next line; says of a world whether every byte is right."""
        while not _line_waits():
            world = self._standby.wait(WAIT_S)
            if world is not None:
                self._world, self._standby = world, None
                version = int(world.host_state)
                return {"adopted": version, "wrong": self._wrong(version), "epoch": world.epoch}
        return {"waiting": True}

    def attach(self, id: str, regions: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: A002
        """Takes up a world that came without a worker."""
        self._regions = made(regions)
        devices = list(dict.fromkeys(each.device for each in self._regions if each.device != HOST))
        self._world = self._worker.attach(id, devices=devices)
        version = int(self._world.host_state or b"0")
        return {"attached": version, "wrong": self._wrong(version)}

    def go(self, blocks: int = 0) -> dict[str, Any]:
        """Generates, until the world has moved, the next line comes, or there were so many blocks."""
        world, done = self._world, 0
        try:
            while not _line_waits() and (not blocks or done < blocks):
                with world.block():
                    self._write(world.block_number + 1)
                    time.sleep(BLOCK_MS / 1000)
                world.boundary(str(self._version).encode())
                done += 1
        except SessionMoved as moved:
            self._world = world = None
            return {"moved": moved.destination}
        return {"block": world.block_number, "wrong": self._wrong(world.block_number)}

    def revise(
        self,
        add: list[dict[str, Any]] = [],  # noqa: B006 - never changed
        drop: list[str] = [],  # noqa: B006
        resize: dict[str, list[int]] = {},  # noqa: B006
    ) -> dict[str, Any]:
        """Revises the regions; says of resized ones whether the corner is what it was and the rest zero."""
        before = {name: self._bytes(name) for name in resize}
        began = time.perf_counter()
        self._world.revise(add=add, drop=drop, resize=resize)
        took = (time.perf_counter() - began) * 1000
        kept = {}
        for name, old in before.items():
            new = self._bytes(name)
            expected = np.zeros_like(new)
            corner = tuple(slice(0, min(pair)) for pair in zip(old.shape, new.shape, strict=True))
            expected[corner] = old[corner]
            kept[name] = bool(np.array_equal(new, expected))
        fresh = {each["name"]: not self._bytes(each["name"]).any() for each in add}
        self._regions = list(self._world.regions)
        return {
            "ms": took,
            "kept": kept,
            "zero": fresh,
            "revision": self._world.manifest.revision,
            "regions": [
                {"name": r.name, "dtype": r.dtype, "shape": list(r.shape), "device": r.device}
                for r in self._regions
            ],
        }

    def _bytes(self, name: str) -> np.ndarray:
        """A copy of a region on the host, as elements of its size."""
        view = self._world.tensor(name)
        if isinstance(view, np.ndarray):
            return view.copy()
        face = view.__cuda_array_interface__
        out = np.empty(face["shape"], dtype=np.dtype(face["typestr"]))
        with cupy.cuda.Device(view.ordinal):
            cupy.cuda.runtime.memcpy(out.ctypes.data, view.address, out.nbytes, 4)
        return out

    def refused(self, device: str, kind: str) -> dict[str, Any]:
        """What is said of memory of a kind that has no handle."""
        nbytes = 4 << 20
        region = Region("r", "uint8", (nbytes,), device=device)
        if kind == "expandable":
            import torch  # noqa: PLC0415 - not everywhere

            array: Any = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{find(device).ordinal}")
        else:
            make = self._made if kind == "virtual" else self._allocate
            address = make(device, nbytes, kind)
            face = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
            array = SimpleNamespace(__cuda_array_interface__=face)
        return {"accepted": own_region(region, array).source.offset}

    def torch(self) -> dict[str, Any]:
        """Whether PyTorch is here and could take a GPU's memory: an imagined one's it can't."""
        try:
            import torch  # noqa: PLC0415 - not everywhere
        except (ImportError, OSError):  # OSError: a build for CUDA without CUDA's libraries
            return {"sees_gpus": False}
        return {"sees_gpus": bool(torch.cuda.is_available())}

    def _made(self, device: str, nbytes: int, kind: str) -> int:
        gpu = Device(device)
        fd = gpu.create(nbytes)
        self._hogs.append(fd)
        self._blocks[f"{kind} {fd}"] = gpu.map(fd, nbytes)
        return self._blocks[f"{kind} {fd}"].address

    def hog(self, device: str, leave: int) -> dict[str, Any]:
        """Takes a GPU's memory, but for about `leave` bytes; takes nothing where there is less."""
        gpu = self._gpus.setdefault(device, Device(device))
        wanted = gpu.free()[0] - leave
        if wanted > 0:
            self._hogs.append(gpu.create(wanted))
        return {"took": wanted, "free": gpu.free()[0]}

    def unhog(self) -> dict[str, Any]:
        """Gives it back."""
        for fd in self._hogs:
            os.close(fd)
        self._hogs.clear()
        return {}

    def end(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Ends a session."""
        self._worker.end(id)
        self._world = None
        return {}

    def still(self) -> dict[str, Any]:
        """Nothing: its line ends what goes on until the next one."""
        return {}

    def forget(self) -> dict[str, Any]:
        """Leaves world and standby."""
        if self._world is not None:
            self._world.close()
        if self._standby is not None:
            self._standby.close()
        self._world = self._standby = None
        return {}


def _line_waits() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main(arguments: list[str]) -> None:
    """Runs until the parent ends it."""
    url, parent = arguments
    end_with_parent(int(parent))
    stack = Stack(url)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        try:
            answer = getattr(stack, order.pop("do"))(**order)
        except WorldMoveError as error:
            answer = {"error": error.code, "message": error.message, "details": error.details}
        except Exception as error:  # noqa: BLE001 - whoever gave the order says why it failed
            answer = {"error": type(error).__name__, "message": str(error)}
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
