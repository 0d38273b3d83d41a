"""Memory files that another process hands over: whether they can be read and mapped without harm.

A descriptor may be of anything: of a file that answers when its owner pleases, of a pipe, of one that becomes
shorter while it is read. Only memory files know seals, so one that shows the right seal is none of these.
"""

from __future__ import annotations

import fcntl
import os


def unsealed(fd: int, nbytes: int) -> str | None:
    """Why a descriptor is no memory file of at least `nbytes` (1 or more) that stays as long; `None`: it is.

    Reading one never waits for anybody, and touching a mapping of one is no SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        closed = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        size = os.fstat(fd).st_size
    except OSError as error:
        return f"is no memory file: {error}"
    if closed:
        return "can't be read"
    if not seals & fcntl.F_SEAL_SHRINK or not 0 < nbytes <= size:
        return "is not sealed or too small"
    return None
