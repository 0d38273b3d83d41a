"""What the system had too little of: its refusal, told as what was needed and what there is.

A process can run out of four things while memory is free: descriptors, address space, the size that its files
may have, and threads. Each has a limit of its own, and whoever reads the refusal has to know which.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from worldmove.errors import NoMemoryError

DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
MEMORY = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.ENOBUFS})
SHORTAGES = DESCRIPTORS | MEMORY
"""What the system answers where it has not enough of something."""


def shortage(what: str, nbytes: int, error: OSError) -> NoMemoryError | None:
    """The rejection for what the system refused to `what`; `None` if nothing was short.

    Args:
        what: was wanted, for the message.
        nbytes: how much memory that takes.
        error: as the system raised it.
    """
    if error.errno in DESCRIPTORS:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return NoMemoryError(
            f"{what}: {os.strerror(error.errno)}; "
            f"this process may have {limit} descriptors (LimitNOFILE, ulimit -n)",
            required=1,
            available=0,
        )
    if error.errno not in MEMORY:
        return None
    available = file_bytes() if error.errno == errno.EFBIG else address_space()
    return NoMemoryError(
        f"{what}: {nbytes} bytes are needed, {available} are available ({os.strerror(error.errno)})",
        required_bytes=nbytes,
        available_bytes=available,
    )


def file_bytes() -> int:
    """Bytes that a file of this process may have, memory files included (`RLIMIT_FSIZE`)."""
    return _limit(resource.RLIMIT_FSIZE)


def address_space() -> int:
    """Bytes that this process may still map (`RLIMIT_AS` less what proc(5) says of its size)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(_limit(resource.RLIMIT_AS) - pages * resource.getpagesize(), 0)


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return (1 << 63) - 1 if soft == resource.RLIM_INFINITY else soft
