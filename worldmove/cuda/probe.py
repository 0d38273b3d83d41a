"""`python -m worldmove.cuda.probe`: which GPUs there are, asked in a process of its own.

A node holds no CUDA: it asks this program once, when it starts, and reads one JSON list.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from worldmove.cuda.driver import DeviceInfo, devices
from worldmove.errors import ConfigError, DeviceError

PROBE_S = 60.0
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver, on Linux and on Linux under Windows."""
EXTRA = "pip install 'worldmove[cu13]' (CUDA 12: cu12)"
"""How to get what a GPU's executor and its workers are made of."""


def driver_present() -> bool:
    """Whether this machine has a GPU's driver at all; costs nothing where it has not."""
    return any(path.exists() for path in DRIVERS)


async def ask(module: str) -> bytes:
    """What a module of ours writes to stdout, in a process of its own.

    Raises:
        DeviceError: it fails, and its last words stand in the message; or it takes longer than `PROBE_S`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PROBE_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise DeviceError(f"no answer within {PROBE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise DeviceError(last[0][:500])
    return answer


async def probe() -> list[DeviceInfo]:
    """The GPUs of this machine that its processes can see.

    Raises:
        DeviceError: CUDA's driver can't be used; the program's last words stand in the message.
    """
    try:
        answer = await ask("worldmove.cuda.probe")
    except DeviceError as error:
        raise DeviceError(f"GPUs cannot be listed: {error.message}") from error
    return msgspec.json.decode(answer, type=list[DeviceInfo])


async def usable() -> list[DeviceInfo]:
    """The GPUs, at least one, for a command that was asked to use them: before it starts anything.

    Raises:
        ConfigError: CUDA's driver can't be used, there is no GPU, or CuPy is not installed; how to get it
            stands in the message.
    """
    try:
        found = await probe()
    except DeviceError as error:
        raise ConfigError(
            f"{error.message}; needed are NVIDIA's driver and {EXTRA}; worldmove doctor looks at both",
            option="gpu",
        ) from error
    if not found:
        raise ConfigError("there is no GPU here, or CUDA_VISIBLE_DEVICES hides it", option="gpu")
    if find_spec("cupy") is None:
        raise ConfigError(f"GPUs need CuPy, which is not installed: {EXTRA}", option="gpu")
    return found


def main() -> int:
    """Writes the list to stdout."""
    try:
        found = devices()
    except DeviceError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    os.write(sys.stdout.fileno(), msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
