"""All that must be equal on two hosts for them to generate the same bits.

A flat mapping of names to strings, so that any stack can add what it knows (attention backend, scheduler,
resolution, parallel sizes) and a mismatch can name the differing fields. For host worlds the bits depend
on the instruction sets that NumPy and BLAS choose from, on BLAS itself and its threads, on the C library's
mathematics, and on the model's weights. The host's name, its kernel and its clock are not part of it.

NumPy and threadpoolctl are asked for what is loaded now: import what the world computes with first.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from worldmove.errors import ValidationError

MAX_FIELDS = 256
MAX_LENGTH = 512

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


def collect(
    extra: Mapping[str, str] | None = None, *, model: str, weights_digest: str | None = None
) -> dict[str, str]:
    """The fingerprint of this process on this host.

    Args:
        extra: what the serving stack adds; its names must not be taken.
        model: name of the model, as in the manifest.
        weights_digest: digest of the weights that are loaded, in the stack's own notation.

    Raises:
        ValidationError: `extra` has a name that is taken, too many fields, or a field too long.
    """
    fields = {
        "machine": platform.machine(),
        "system": platform.system(),
        "libc": "-".join(platform.libc_ver()),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numpy": np.__version__,
        "model": model,
        **cpu_fields(_cpuinfo()),
        **_numpy_fields(),
        **_blas_fields(),
        **{f"env.{name}": os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
    if weights_digest is not None:
        fields["weights"] = weights_digest
    added = dict(extra or {})
    taken = sorted(fields.keys() & added.keys())
    if taken:
        raise ValidationError(
            f"fingerprint fields {taken} are taken; choose other names", field="fingerprint"
        )
    fields |= added
    check(fields)
    return fields


def check(fields: Mapping[str, str]) -> None:
    """Bounds a fingerprint, wherever it comes from.

    Raises:
        ValidationError: more than `MAX_FIELDS` fields, or a name or value over `MAX_LENGTH` characters.
    """
    if len(fields) > MAX_FIELDS:
        raise ValidationError(
            f"fingerprint has {len(fields)} fields; at most {MAX_FIELDS} are allowed", field="fingerprint"
        )
    for name, value in fields.items():
        if not 1 <= len(name) <= MAX_LENGTH or len(value) > MAX_LENGTH:
            raise ValidationError(
                f"fingerprint field {name[:64]!r} is empty or longer than {MAX_LENGTH} characters",
                field=f"fingerprint.{name[:64]}",
            )


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the fields that differ or stand on one side only, sorted; empty where the hosts match."""
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


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
