"""The durable record of who owns which session at which epoch."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from worldmove.errors import ConfigError
from worldmove.ledger.base import Ledger
from worldmove.ledger.sqlite import SqliteLedger

__all__ = ["check_url", "open_ledger"]

_ALLOWED = "allowed are sqlite:///RELATIVE/PATH and sqlite:////ABSOLUTE/PATH"


def check_url(url: str) -> Path:
    """The path of the SQLite file that a ledger URL names.

    Raises:
        ConfigError: the URL is malformed or of a kind that is not supported yet, or the file's directory
            does not exist.
    """
    parts = urlsplit(url)
    if parts.scheme == "etcd":
        raise ConfigError(f"ledger {url!r}: etcd arrives with a later version; {_ALLOWED}", option="ledger")
    if parts.scheme != "sqlite" or parts.netloc or not url.startswith("sqlite:///"):
        raise ConfigError(f"ledger {url!r} is not supported; {_ALLOWED}", option="ledger")
    name = url.removeprefix("sqlite:///")
    if not name or name.endswith("/") or parts.query or parts.fragment or "\0" in name or ":memory:" in name:
        raise ConfigError(f"ledger {url!r} names no file; {_ALLOWED}", option="ledger")
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise ConfigError(
            f"ledger {url!r}: there is no directory {path.parent}; make it, or name another place",
            option="ledger",
        )
    return path


async def open_ledger(url: str) -> Ledger:
    """Opens the ledger of a URL; a SQLite file is made if it is absent, its directory is not.

    Raises:
        ConfigError: as `check_url`.
        LedgerError: the file cannot be opened as a ledger of this version.
    """
    return await SqliteLedger.open(check_url(url))
