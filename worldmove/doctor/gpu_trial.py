"""`python -m worldmove.doctor.gpu_trial`: does with every GPU what a node would do, once, and undoes it.

Memory is made on each GPU and passed as a descriptor to a second process, which has to find in it what was
written: as between a node and its workers. Then it is mapped by every other GPU and copied there. All that
happens in processes of their own, so that what goes wrong with CUDA, or hangs, ends with them. One JSON
document on stdout; what fails stands in it, by name.

`… gpu_trial UUID FD NBYTES` is the second process: it prints what is wrong with the memory, or nothing.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import msgspec
import numpy as np

from worldmove.cuda.driver import devices
from worldmove.cuda.memory import Device, Window
from worldmove.errors import WorldMoveError

SMALL = 2 << 20
LARGE = 128 << 20
COPIES = 4
SECOND_S = 60.0


class PeerTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Another GPU's memory mapped and copied from.

    Attributes:
        uuid: whose memory. problem: empty where it went well. gb_per_s: 10⁹ bytes a second.
    """

    uuid: str
    problem: str = ""
    gb_per_s: float | None = None


class DeviceTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried with one GPU; problems are empty where it went well.

    Attributes:
        descriptor: making memory and exporting it.
        shared: finding the same bytes in a second process.
        pinned: copying to host memory that is registered with the driver, at `pinned_gb_per_s`.
        peers: copying from every other GPU.
    """

    uuid: str
    name: str
    descriptor: str = ""
    shared: str = ""
    pinned: str = ""
    pinned_gb_per_s: float | None = None
    peers: tuple[PeerTrial, ...] = ()


class Host:
    """Anonymous host memory that a device has registered, until `close`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes = np.frombuffer(self._mapped, dtype=np.uint8)
        self._start = int(self.bytes.ctypes.data)
        self.address = device.register(self._start, nbytes)

    def close(self) -> None:
        """Gives it back."""
        self._device.unregister(self._start)
        del self.bytes
        self._mapped.close()


def pattern() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What both processes know: `SMALL` bytes of noise."""
    return np.random.Generator(np.random.PCG64(7)).integers(0, 256, SMALL, dtype=np.uint8)


def look(uuid: str, fd: int, nbytes: int) -> str:
    """What is wrong with the memory of another process; empty: nothing."""
    try:
        device = Device(uuid)
        mapping, host = device.map(fd, nbytes), Host(device, SMALL)
        device.copy(host.address, mapping.address, SMALL)
        device.synchronize()
    except WorldMoveError as error:
        return error.message
    return "" if np.array_equal(host.bytes, pattern()) else "a second process sees other bytes"


def _ask_second(uuid: str, fd: int) -> str:
    command = [sys.executable, "-m", "worldmove.doctor.gpu_trial", uuid, str(fd), str(LARGE)]
    try:
        answer = subprocess.run(
            command, pass_fds=(fd,), capture_output=True, text=True, timeout=SECOND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a second process did not come through in {SECOND_S:g} s"
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:] or ["nothing"]
        return f"a second process failed: {last[0][:300]}"
    return answer.stdout.strip()


class _Tried:
    """One GPU, its memory, and what was found; used while the others are tried."""

    def __init__(self, uuid: str, name: str) -> None:
        self.found = DeviceTrial(uuid=uuid, name=name)
        self.device: Device | None = None
        self.fd = -1

    def begin(self) -> None:
        """Makes memory, writes the pattern, has a second process look at it, copies to and from the host."""
        try:
            self.device = Device(self.found.uuid)
            self.fd = self.device.create(LARGE)
            mapping = self.device.map(self.fd, LARGE)
        except WorldMoveError as error:
            self._note(descriptor=error.message)
            return
        try:
            self._copy_host(mapping)
            wrong = "nothing could be written" if self.found.pinned else _ask_second(self.found.uuid, self.fd)
            self._note(shared=wrong)
        finally:
            mapping.close()

    def reach(self, other: _Tried) -> PeerTrial:
        """Copies the other GPU's memory to this one, by this one."""
        uuid = other.found.uuid
        if self.device is None or self.fd < 0 or other.fd < 0:
            return PeerTrial(uuid=uuid, problem="one of the two has no memory to share")
        try:
            theirs = self.device.map(other.fd, LARGE)
            mine = self.device.map(self.fd, LARGE)
            rate = _rate(self.device, mine.address, theirs.address)
            mine.close()
            theirs.close()
        except WorldMoveError as error:
            return PeerTrial(uuid=uuid, problem=error.message)
        return PeerTrial(uuid=uuid, gb_per_s=rate)

    def end(self, peers: list[PeerTrial]) -> DeviceTrial:
        """Everything that was found."""
        self._note(peers=tuple(peers))
        return self.found

    def _copy_host(self, mapping: Window) -> None:
        if self.device is None:
            return
        try:
            host = Host(self.device, LARGE)
        except (WorldMoveError, OSError) as error:
            self._note(pinned=str(error))
            return
        try:
            self._note(pinned_gb_per_s=_rate(self.device, host.address, mapping.address))
            host.bytes[:SMALL] = pattern()
            self.device.copy(mapping.address, host.address, SMALL)
            self.device.synchronize()
        except WorldMoveError as error:
            self._note(pinned=error.message)
        finally:
            host.close()

    def _note(self, **fields: object) -> None:
        self.found = msgspec.structs.replace(self.found, **fields)


def _rate(device: Device, target: int, source: int) -> float:
    """10⁹ bytes a second, of several copies after a first one."""
    device.copy(target, source, LARGE)
    device.synchronize()
    start = time.perf_counter()
    for _ in range(COPIES):
        device.copy(target, source, LARGE)
    device.synchronize()
    return COPIES * LARGE / (time.perf_counter() - start) / 1e9


def try_all() -> list[DeviceTrial]:
    """Tries every GPU that this process can see.

    Raises:
        DeviceError: CUDA's driver can't be used at all.
    """
    tried = [_Tried(device.uuid, device.name) for device in devices()]
    for each in tried:
        each.begin()
    return [each.end([each.reach(other) for other in tried if other is not each]) for each in tried]


def main(arguments: list[str]) -> int:
    """Either process: see the module's text."""
    try:
        if arguments:
            uuid, fd, nbytes = arguments
            answer = look(uuid, int(fd), int(nbytes)).encode()
        else:
            answer = msgspec.json.encode(try_all())
    except WorldMoveError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    os.write(sys.stdout.fileno(), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
