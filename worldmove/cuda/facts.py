"""What NVIDIA's management library knows of this machine's GPUs; makes no CUDA context.

Only facts, no judgement: `worldmove.doctor.gpu` judges. Whatever the library can't say (a virtual machine
hides much of it) is `None` or empty.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

PCI = Path("/sys/bus/pci/devices")
FABRIC_STATES = ("none", "not started", "under way", "done")

_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
P2P_READ = 0
"""NVML's index of reads between peers: its Python bindings have a tuple under that name."""
_TOPOLOGY = {0: "one board", 10: "one PCIe switch", 20: "PCIe switches", 30: "one host bridge"}
_FARTHER = {40: "one NUMA node", 50: "across sockets"}
_PEER = ("ok", "the chipset can't", "the GPU can't", "the topology can't", "switched off", "not supported")


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG slice of a GPU."""

    uuid: str
    name: str
    total_bytes: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        capability: compute capability, such as (9, 0). pci: its address on the bus, as in sysfs.
        numa_node: of the host's memory that is nearest; `None` where the machine doesn't say.
        compute_mode: `default`, `exclusive-process`, `exclusive-thread` or `prohibited`.
        persistent: whether the driver stays loaded when nobody uses the GPU.
        lanes, most_lanes: of PCIe, in use and possible.
        mig: whether it is cut into slices, which are the only devices then. slices: they.
        fabric: state of its registration with an NVSwitch fabric, an index of `FABRIC_STATES`.
        mps_clients: processes that use it through an MPS server.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    pci: str
    numa_node: int | None = None
    compute_mode: str = "default"
    persistent: bool | None = None
    lanes: int | None = None
    most_lanes: int | None = None
    mig: bool = False
    slices: tuple[Slice, ...] = ()
    fabric: int | None = None
    mps_clients: int = 0


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Between two GPUs.

    Attributes:
        ends: their UUIDs. nvlinks: how many links the first one has up, to the other or to a switch.
        peer: `ok`, or why one can't reach the other's memory. topology: what lies between them on PCIe.
    """

    ends: tuple[str, str]
    nvlinks: int
    peer: str
    topology: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs, and what lies between them; `cuda` is the newest version that the driver serves."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]


def collect(nvml: Any = None, pci: Path = PCI) -> GpuFacts | str:
    """The facts, or why there are none.

    Args:
        nvml: the library's bindings (`pynvml`), or what stands for them in a test.
        pci: where the kernel shows devices of the bus.
    """
    try:
        library = importlib.import_module("pynvml") if nvml is None else nvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        library.nvmlInit()
        try:
            return _collect(library, pci)
        finally:
            library.nvmlShutdown()
    except library.NVMLError as error:
        return f"NVML: {error}"


def _collect(nvml: Any, pci: Path) -> GpuFacts:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = [_gpu(nvml, handle, pci) for handle in handles]
    pairs = combinations(zip(handles, gpus, strict=True), 2)
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    return GpuFacts(
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(gpus),
        links=tuple(
            _link(nvml, (one, other), (first.uuid, second.uuid)) for (one, first), (other, second) in pairs
        ),
    )


def _gpu(nvml: Any, handle: Any, pci: Path) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    # NVML writes the domain with eight digits, sysfs with four.
    address = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    domain, _, rest = address.partition(":")
    address = f"{int(domain, 16):04x}:{rest}"
    mig, _ = _try(nvml, partial(nvml.nvmlDeviceGetMigMode, handle)) or (0, 0)
    mode = _try(nvml, partial(nvml.nvmlDeviceGetComputeMode, handle)) or 0
    persistent = _try(nvml, partial(nvml.nvmlDeviceGetPersistenceMode, handle))
    clients = _try(nvml, partial(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)) or ()
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=(int(major), int(minor)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        pci=address,
        numa_node=_numa_node(pci / address / "numa_node"),
        compute_mode=_MODES[int(mode)],
        persistent=None if persistent is None else bool(persistent),
        lanes=_try(nvml, partial(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
        most_lanes=_try(nvml, partial(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
        mig=bool(mig),
        slices=tuple(_slices(nvml, handle)) if mig else (),
        fabric=_fabric(nvml, handle),
        mps_clients=len(clients),
    )


def _slices(nvml: Any, handle: Any) -> list[Slice]:
    found = []
    for index in range(_try(nvml, partial(nvml.nvmlDeviceGetMaxMigDeviceCount, handle)) or 0):
        part = _try(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))
        if part is not None:
            found.append(
                Slice(
                    uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                    name=_text(nvml.nvmlDeviceGetName(part)),
                    total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(part).total),
                )
            )
    return found


def _fabric(nvml: Any, handle: Any) -> int | None:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError:
        return None
    return int(info.state)


def _link(nvml: Any, handles: tuple[Any, Any], ends: tuple[str, str]) -> Link:
    one, other = handles
    peer = _try(nvml, partial(nvml.nvmlDeviceGetP2PStatus, one, other, P2P_READ))
    level = _try(nvml, partial(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other))
    levels = _TOPOLOGY | _FARTHER
    return Link(
        ends=ends,
        nvlinks=sum(
            _try(nvml, partial(nvml.nvmlDeviceGetNvLinkState, one, number)) == 1
            for number in range(nvml.NVML_NVLINK_MAX_LINKS)
        ),
        peer=_PEER[peer] if peer is not None and peer < len(_PEER) else "unknown",
        topology=levels.get(-1 if level is None else int(level), "unknown"),
    )


def _numa_node(path: Path) -> int | None:
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _try(nvml: Any, ask: Callable[[], Any]) -> Any:
    """An answer, or `None` where this GPU, driver or container does not give one."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(raw: bytes | str) -> str:
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else raw
