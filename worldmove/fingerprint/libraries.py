"""The versions of CUDA's libraries that this process has loaded, asked of the libraries themselves.

Wheels bring their own cuBLAS and cuDNN, a process may find others on the system: only what is mapped counts.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARY = re.compile(r"/lib(cublas|cublasLt|cudnn|nvrtc|nccl)\.so[^/\s]*$")
_PACKAGES = {
    "apex": "apex",
    "cupy": "cupy",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "sageattention": "sageattention",
    "transformer_engine": "transformer-engine",
    "triton": "triton",
    "xformers": "xformers",
}
"""Packages that bring kernels, by module: they count once the stack has imported them."""


def library_fields(maps: str | None = None, ask: Callable[[str, str], str] | None = None) -> dict[str, str]:
    """Versions of libraries and of packages with kernels.

    Args:
        maps: text of `/proc/self/maps`; this process's if left out.
        ask: the version of a library by name and path; of the library itself if left out.
    """
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace") if maps is None else maps
    asked = ask or library_version
    return {
        **{f"cuda.{name}": asked(name, path) for name, path in sorted(loaded(text).items())},
        **package_fields(sys.modules),
    }


def loaded(maps: str) -> dict[str, str]:
    """Name and path of each library of CUDA that is mapped."""
    found: dict[str, str] = {}
    for line in maps.splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        match = _LIBRARY.search(path)
        if match:
            found[match[1]] = path
    return found


def library_version(name: str, path: str) -> str:
    """What a library says of its version; `unknown` if it says nothing."""
    try:
        library = ctypes.CDLL(path)
        if name in ("cublas", "cublasLt"):
            parts = [ctypes.c_int() for _ in range(3)]
            get = getattr(library, f"{name}GetProperty")
            for kind, part in enumerate(parts):
                get(kind, ctypes.byref(part))
            return ".".join(str(part.value) for part in parts)
        if name == "cudnn":
            library.cudnnGetVersion.restype = ctypes.c_size_t
            return str(library.cudnnGetVersion())
        major, minor = ctypes.c_int(), ctypes.c_int()
        if name == "nvrtc":
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            return f"{major.value}.{minor.value}"
        library.ncclGetVersion(ctypes.byref(major))
        return str(major.value)
    except (OSError, AttributeError):
        return "unknown"


def package_fields(modules: Mapping[str, object]) -> dict[str, str]:
    """Versions of the packages with kernels that are among the imported modules."""
    fields = {}
    for module, package in _PACKAGES.items():
        if module in modules:
            fields[f"package.{module}"] = _version(modules[module], package)
    return fields


def _version(module: object, package: str) -> str:
    own = getattr(module, "__version__", None)
    if isinstance(own, str):
        return own
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
