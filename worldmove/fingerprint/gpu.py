"""What decides the bits of a GPU: its model, architecture, size, slice, and the driver that compiles for it.

Which GPU it is does not count: the fields of two hosts are equal where their GPUs are alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from worldmove.cuda.driver import MIG_NAME, bindings, call, devices
from worldmove.fingerprint.host import environment_fields

UNKNOWN = "unknown"
UNSEEN = "not seen by this process"
VERSION_FILE = Path("/sys/module/nvidia/version")

_ENVIRONMENT = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED",
)
"""Variables that choose other kernels; each counts only where it is set."""


class Gpu(NamedTuple):
    """A GPU as far as it decides bits. `mig` is the profile of a slice (`1g.18gb`), or `none`."""

    name: str
    compute: str
    sms: int
    mig: str


class Hardware(NamedTuple):
    """The GPUs that a process sees, by UUID; version of the driver, and of CUDA that it speaks."""

    gpus: dict[str, Gpu]
    driver: str
    cuda: str


def gpu_fields(wanted: Sequence[str], read: Callable[[], Hardware] | None = None) -> dict[str, str]:
    """The fields of GPUs, numbered in the world's order.

    Args:
        wanted: UUIDs.
        read: what asks the driver; `read_hardware` if left out.

    Raises:
        DeviceError: CUDA's driver can't be asked.
    """
    hardware = (read or read_hardware)()
    fields = {
        "gpu.count": str(len(wanted)),
        "gpu.driver": hardware.driver,
        "gpu.cuda": hardware.cuda,
        **environment_fields(_ENVIRONMENT),
    }
    for number, uuid in enumerate(wanted):
        gpu = hardware.gpus.get(uuid)
        if gpu is None:
            # A rank's own GPU, hidden from this one's process: the node knows the rest.
            fields[f"gpu.{number}.name"] = UNSEEN
            continue
        fields |= {f"gpu.{number}.{name}": str(value) for name, value in gpu._asdict().items()}
    return fields


def read_hardware() -> Hardware:
    """Asks CUDA's driver; makes no context on any GPU.

    Raises:
        DeviceError: it can't be asked.
    """
    driver = bindings()
    kinds = driver.CUdevice_attribute
    gpus = {}
    for info in devices():
        device = call(driver, "cuDeviceGet", info.ordinal)
        major, minor, sms = (
            int(call(driver, "cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{kind}"), device))
            for kind in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
        )
        name, _, profile = info.name.partition(MIG_NAME)
        gpus[info.uuid] = Gpu(name, f"{major}.{minor}", sms, profile or "none")
    version = int(call(driver, "cuDriverGetVersion"))
    return Hardware(gpus, driver_version(), f"{version // 1000}.{version % 1000 // 10}")


def driver_version(load: Callable[[str], Any] = importlib.import_module, file: Path = VERSION_FILE) -> str:
    """The driver's own version, from the kernel or, where that is hidden, by NVML; else `unknown`."""
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        pass
    try:
        nvml = load("pynvml")
    except ImportError:
        return UNKNOWN
    try:
        nvml.nvmlInit()
        try:
            found = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return UNKNOWN
    return found.decode("ascii", "replace") if isinstance(found, bytes) else str(found)
