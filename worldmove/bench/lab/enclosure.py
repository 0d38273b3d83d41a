"""Namespaces of its own for the laboratory, so that nothing of it outlives it, even when it is killed.

The laboratory runs in a process that is root, and the first, in new network, mount and process namespaces.
When it ends, the kernel ends every process in them and takes their devices down. Where this user is not root,
a user namespace makes it root inside, if the system allows that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from worldmove.errors import ConfigError


def command(arguments: Sequence[str]) -> list[str]:
    """What runs `arguments` enclosed; it dies with its parent."""
    inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [*inside, *root, "--", *arguments]


def check() -> None:
    """Whether namespaces can be made here.

    Raises:
        ConfigError: they can't; says why.
    """
    try:
        tried = subprocess.run(
            command(["true"]), check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "unshare is not installed; on Debian or Ubuntu: apt-get install util-linux"
        ) from error
    if tried.returncode:
        raise ConfigError(
            "network namespaces can't be made here, which the laboratory consists of: "
            f"{tried.stderr.strip()}; run it as root, with CAP_SYS_ADMIN in a container"
        )


def run(module: str, arguments: Sequence[str]) -> int:
    """Runs a module of this package enclosed, on this process's own output; returns its exit code.

    Raises:
        ConfigError: namespaces can't be made here.
    """
    check()
    return subprocess.run(
        command([sys.executable, "-m", module, *arguments]), check=False, stdin=subprocess.DEVNULL
    ).returncode
