"""PyTorch's build and its flags, if the process has imported it; it is never imported for this.

A flag that a version of PyTorch doesn't have is left out: versions must be equal anyway.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

_FLAGS = (
    "get_default_dtype",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "get_num_threads",
    "backends.cudnn.version",
    "backends.cudnn.is_available",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cuda.preferred_blas_library",
    "backends.cuda.preferred_linalg_library",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.mkldnn.enabled",
    "utils.deterministic.fill_uninitialized_memory",
)


def torch_fields(torch: Any = None) -> dict[str, str]:
    """The fields; none if the process has not imported PyTorch.

    Args:
        torch: the module; the one that is imported if left out.
    """
    torch = torch or sys.modules.get("torch")
    # While it is being imported it has no version yet, and nothing was computed with it.
    if torch is None or not hasattr(torch, "__version__") or not hasattr(torch, "version"):
        return {}
    fields = {
        "torch": str(torch.__version__),
        "torch.git": str(torch.version.git_version),
        "torch.cuda": str(torch.version.cuda),
        "torch.build": _digest(torch.__config__.show()),
    }
    for flag in _FLAGS:
        value = _read(torch, flag)
        if value is not None:
            fields[f"torch.{flag.removeprefix('get_')}"] = value
    return fields


def _read(torch: Any, flag: str) -> str | None:
    """A flag's value; `None` if this version hasn't got it."""
    found: Any = torch
    for name in flag.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    try:
        return str(found() if callable(found) else found)
    except RuntimeError:
        # Flags of the old and of the new interface to TF32 can't be read once both were set.
        return "mixed"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
