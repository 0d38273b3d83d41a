"""`python -m worldmove.bench.gpu_raw`: bare copies between two GPUs, what a move is compared with.

    python -m worldmove.bench.gpu_raw SOURCE TARGET REGIONS REGION_BYTES

Memory is made and mapped as a node makes and maps it, and the target copies by its copy engines: everything
at once (`whole`), and region by region. One JSON document: milliseconds of each copy, by CUDA events; or,
with exit status 3, of what memory there is too little.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import msgspec

from worldmove.errors import NoMemoryError, ProcessLostError

COPIES = 20
WARM_UP = 2
FULL = 3
"""Exit status where a GPU has not the memory."""
_ANY_DIRECTION = 4


class Lacking(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU has too little of."""

    message: str
    details: dict[str, int]


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of the single copies, in the order in which they were taken."""

    whole: list[float]
    regions: list[float]


async def raw_copies(devices: Sequence[str], regions: int, region_bytes: int) -> Copies:
    """Copies in a process of its own, which leaves no context behind.

    Args:
        devices: UUIDs of the source and of the target.
        regions: how many.
        region_bytes: bytes of each.

    Raises:
        NoMemoryError: a GPU has not the memory; what is needed and what is free stand in it.
        ProcessLostError: it failed; its last words stand in the message.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worldmove.bench.gpu_raw", *devices, str(regions), str(region_bytes)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    answer, errors = await process.communicate()
    if process.returncode == FULL:
        lacking = msgspec.json.decode(answer, type=Lacking)
        raise NoMemoryError(f"bare copies: {lacking.message}", **lacking.details)
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise ProcessLostError(f"bare copies failed: {last[0][:500]}")
    return msgspec.json.decode(answer, type=Copies)


def copy(source: str, target: str, regions: int, region_bytes: int) -> Copies:
    """Copies, in this process.

    Raises:
        DeviceError, NoMemoryError: the GPUs can't be used so.
    """
    import cupy  # noqa: PLC0415 - whoever calls `raw_copies` holds no CUDA

    from worldmove.cuda.memory import Device  # noqa: PLC0415 - likewise

    there, here = Device(source), Device(target)
    nbytes = regions * region_bytes
    fds = [there.create(nbytes), here.create(nbytes)]
    cupy.cuda.Device(here.info.ordinal).use()
    theirs, mine = (here.map(fd, nbytes) for fd in fds)
    stream = cupy.cuda.Stream(non_blocking=True)
    found = Copies(whole=[], regions=[])
    for number in range(COPIES + WARM_UP):
        for times, parts in ((found.whole, 1), (found.regions, regions)):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            size = nbytes // parts
            begin.record(stream)
            for offset in range(0, nbytes, size):
                cupy.cuda.runtime.memcpyAsync(
                    mine.address + offset, theirs.address + offset, size, _ANY_DIRECTION, stream.ptr
                )
            end.record(stream)
            end.synchronize()
            if number >= WARM_UP:
                times.append(cupy.cuda.get_elapsed_time(begin, end))
    return found


def main(arguments: list[str]) -> int:
    """Writes the document to stdout; returns the exit status."""
    source, target, regions, region_bytes = arguments
    found: Copies | Lacking
    try:
        found = copy(source, target, int(regions), int(region_bytes))
    except NoMemoryError as error:
        found = Lacking(message=error.message, details=error.details)
    os.write(sys.stdout.fileno(), msgspec.json.encode(found))
    return FULL if isinstance(found, Lacking) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
