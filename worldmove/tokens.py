"""Bearer tokens by role, from a file that is read again when it changes.

The file is TOML with a list of tokens for each role, so that a new token can stand beside an old one
while clients change over:

    operator = ["..."]
    worker = ["..."]
    peer = ["..."]
"""

from __future__ import annotations

import hmac
import os
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from worldmove.errors import ConfigError

Role = Literal["operator", "worker", "peer"]
ROLES: tuple[Role, ...] = get_args(Role)
MIN_TOKEN = 16
MAX_TOKEN = 512
MAX_TOKENS = 64
_ALLOWED = (
    f"a file that only its user can read, TOML, with lists of {MIN_TOKEN} to {MAX_TOKEN} printable ASCII "
    f"characters under {', '.join(ROLES)}"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of each role; never shown in a repr."""

    by_role: dict[Role, tuple[str, ...]] = field(repr=False)

    def roles(self, token: str) -> frozenset[Role]:
        """The roles of `token`; empty where nobody has it. Takes the same time for every wrong token."""
        given = token.encode("utf-8", "surrogateescape")
        found = {
            role
            for role, tokens in self.by_role.items()
            for known in tokens
            if hmac.compare_digest(known.encode(), given)
        }
        return frozenset(found)

    def first(self, role: Role) -> str | None:
        """The token with which this node itself speaks as `role`."""
        tokens = self.by_role.get(role, ())
        return tokens[0] if tokens else None


class TokenFile:
    """The current tokens of a file."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ConfigError: it can't be read, is open to others, or isn't in the format.
        """
        self._path = path
        self._stamp, self._tokens = _read(path)

    def current(self) -> Tokens:
        """The tokens of now; a changed file that is wrong leaves the last good ones in force."""
        try:
            if _stamp(self._path.stat()) != self._stamp:
                self._stamp, self._tokens = _read(self._path)
        except (OSError, ConfigError):
            return self._tokens
        return self._tokens


_Stamp = tuple[int, int, int, int]


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path) -> tuple[_Stamp, Tokens]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            document = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # The decoder's message would quote the line, and the line is a secret.
        raise _wrong(path, f"{type(error).__name__}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _wrong(path, f"mode {stat.S_IMODE(status.st_mode):04o}")
    tokens = Tokens({role: _tokens(path, role, document.pop(role, [])) for role in ROLES})
    if document:
        raise _wrong(path, f"{min(document)!r} is no role")
    return _stamp(status), tokens


def _tokens(path: Path, role: Role, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise _wrong(path, f"{role} is no list of at most {MAX_TOKENS}")
    for number, token in enumerate(value):
        good = isinstance(token, str) and MIN_TOKEN <= len(token) <= MAX_TOKEN
        if not good or not (token.isascii() and token.isprintable()) or " " in token:
            raise _wrong(path, f"{role}[{number}] is no token")
    return tuple(value)


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"token_file is {str(path)!r} ({why}); allowed: {_ALLOWED}", option="token_file", value=str(path)
    )
