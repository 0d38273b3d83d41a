"""What we use of CUDA's driver interface: the one file of this package that imports its bindings.

They are imported when they are first needed, so that a machine without them, or without a GPU, never does.
Every failure leaves here as one of our own errors.
"""

from __future__ import annotations

import importlib
import uuid
from typing import Any, NamedTuple

from worldmove.errors import DeviceError, NoMemoryError

MIG_NAME = " MIG "
"""Stands in the name that the driver gives a slice of a GPU, whose UUID then begins with `MIG-`."""

_SUCCESS = 0
_OUT_OF_MEMORY = 2


class DeviceInfo(NamedTuple):
    """A GPU, or a MIG slice of one, that this process can see.

    Attributes:
        ordinal: the driver's number for it in this process; it means nothing elsewhere.
        uuid: its name everywhere, `GPU-…` or `MIG-…`.
        name: of the product.
        total_bytes: its memory.
        bus_id: of the PCI device, `domain:bus:device.function`.
    """

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    bus_id: str


def bindings() -> Any:
    """The driver's bindings, initialised.

    Raises:
        DeviceError: they are not installed, or there is no driver.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        status = driver.cuInit(0)[0]
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(f"CUDA's driver cannot be used: {error}") from error
    if int(status) != _SUCCESS:
        raise DeviceError(f"CUDA's driver cannot be used: {status.name}")
    return driver


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Calls a function of the driver; its result, or a tuple where it has none or several.

    Raises:
        NoMemoryError: the device has not that much memory left.
        DeviceError: anything else; the function and the driver's own word for it stand in the message.
    """
    status, *results = getattr(driver, name)(*arguments)
    if int(status) == _OUT_OF_MEMORY:
        raise NoMemoryError(f"{name}: the device is out of memory")
    if int(status) != _SUCCESS:
        raise DeviceError(f"{name}: {status.name}", status=status.name)
    return results[0] if len(results) == 1 else tuple(results)


def devices() -> list[DeviceInfo]:
    """Every GPU that this process can see; makes no context on any.

    Raises:
        DeviceError: CUDA's driver can't be used.
    """
    driver = bindings()
    found = []
    for ordinal in range(call(driver, "cuDeviceGetCount")):
        device = call(driver, "cuDeviceGet", ordinal)
        name = _text(call(driver, "cuDeviceGetName", 256, device))
        number = uuid.UUID(bytes=bytes(call(driver, _uuid_call(driver), device).bytes))
        kind = "MIG" if MIG_NAME in f" {name} " else "GPU"
        total = int(call(driver, "cuDeviceTotalMem", device))
        bus_id = _text(call(driver, "cuDeviceGetPCIBusId", 32, device))
        found.append(DeviceInfo(ordinal, f"{kind}-{number}", name, total, bus_id))
    return found


def _uuid_call(driver: Any) -> str:
    """The function that knows slices: in bindings of CUDA 12 the plain one gives a slice its GPU's UUID.

    Those of CUDA 13 have one name for it again.
    """
    return "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"


def find(wanted: str) -> DeviceInfo:
    """The device of a UUID.

    Raises:
        DeviceError: this process can't see it; those that it can see stand in the message.
    """
    seen = devices()
    for device in seen:
        if device.uuid == wanted:
            return device
    raise DeviceError(f"device {wanted!r} is not here; there are {[device.uuid for device in seen]}")


class Current:
    """A context made the thread's current one for a while; what was current before is so again."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        call(self._driver, "cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        call(self._driver, "cuCtxPopCurrent")


def _text(raw: bytes | str) -> str:
    return raw.split(b"\0")[0].decode("ascii", "replace") if isinstance(raw, bytes) else raw
