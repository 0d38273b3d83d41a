"""What decides the bits of a host: its instruction sets, NumPy, and the numerical libraries that are loaded.

NumPy and threadpoolctl are asked for what is loaded now: import what the world computes with first.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

_CPUINFO = Path("/proc/cpuinfo")
_CPU_KEYS = ("vendor_id", "model name", "CPU implementer", "CPU architecture", "CPU part", "CPU variant")
_FLAG_KEYS = ("flags", "Features")
_ENVIRONMENT = (
    "BLIS_ARCH_TYPE",
    "GLIBC_TUNABLES",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES",
    "OPENBLAS_CORETYPE",
)
"""Variables that choose other code paths; each counts only where it is set."""


def host_fields() -> dict[str, str]:
    """The fields of this process on this host."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "libc": "-".join(platform.libc_ver()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        **cpu_fields(_cpuinfo()),
        **_numpy_fields(),
        **_blas_fields(),
        **environment_fields(_ENVIRONMENT),
    }


def environment_fields(names: tuple[str, ...]) -> dict[str, str]:
    """Those of the variables that are set, as `env.NAME`."""
    return {f"env.{name}": os.environ[name] for name in names if name in os.environ}


def cpu_fields(cpuinfo: str) -> dict[str, str]:
    """Processor and instruction sets from the first entry of a `/proc/cpuinfo` text.

    The flags are a set of some hundred words: they count as one BLAKE2b-128 digest of the sorted words.
    """
    entry: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        entry[name.strip()] = value.strip()
    flags = " ".join(sorted({flag for key in _FLAG_KEYS for flag in entry.get(key, "").split()}))
    return {
        "cpu": " ".join(entry[key] for key in _CPU_KEYS if entry.get(key)) or "unknown",
        "cpu.flags": hashlib.blake2b(flags.encode(), digest_size=16).hexdigest(),
    }


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"model name : {platform.processor()}"


def _numpy_fields() -> dict[str, str]:
    """What NumPy was built against and which of its instruction sets this processor has."""
    configuration: dict[str, Any] = dict(np.show_config(mode="dicts") or {})
    simd = configuration.get("SIMD Extensions", {})
    blas = configuration.get("Build Dependencies", {}).get("blas", {})
    return {
        "numpy.simd": " ".join([*simd.get("baseline", ()), *simd.get("found", ())]),
        "numpy.blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
    }


def _blas_fields() -> dict[str, str]:
    """The numerical libraries that are loaded: version, chosen kernels and threads of each."""
    libraries = sorted(
        " ".join(
            str(library.get(key, ""))
            for key in (
                "user_api",
                "internal_api",
                "version",
                "architecture",
                "threading_layer",
                "num_threads",
            )
        )
        for library in threadpoolctl.threadpool_info()
    )
    return {f"library.{number}": text for number, text in enumerate(libraries)}
