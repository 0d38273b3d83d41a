"""Who may do what: bearer tokens with three roles, or nothing but this host.

Without a token file the node serves loopback only. Everybody on the host may then use it, but web pages
in a browser of this host may not: requests that name another host (DNS rebinding) and connections that
carry an `Origin` are refused.

Peers need a certificate beside their token where the node serves TLS and has a CA for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from worldmove.config import Settings
from worldmove.errors import ForbiddenError, UnauthorizedError
from worldmove.options import is_loopback
from worldmove.tokens import MAX_TOKEN, Role, TokenFile

ANYBODY: tuple[Role, ...] = ("operator", "worker", "peer")
OPERATOR: tuple[Role, ...] = ("operator",)
WORKER: tuple[Role, ...] = ("operator", "worker")
PEER: tuple[Role, ...] = ("peer",)


class Security:
    """The checks of one app."""

    def __init__(self, settings: Settings) -> None:
        """Reads the token file.

        Raises:
            ConfigError: the token file is wrong.
        """
        self._file = TokenFile(settings.token_file) if settings.token_file is not None else None
        self._mutual = settings.tls_cert is not None and settings.tls_ca is not None
        names = {settings.http.host.lower(), "localhost"}
        if settings.advertise is not None:
            names.add((urlsplit(settings.advertise).hostname or "").lower())
        self._names = names

    @property
    def guarded(self) -> bool:
        """Whether tokens are asked for."""
        return self._file is not None

    def host_allowed(self, host: str) -> bool:
        """Whether a `Host` header names this node; with tokens every name may, as a page has no token."""
        if self._file is not None:
            return True
        bare = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        return bare.lower() in self._names or is_loopback(bare)

    def check_peer(self, connection: HTTPConnection) -> None:
        """Lets another node pass: by its token, and by its certificate where both sides have one.

        Raises:
            UnauthorizedError: no certificate of the CA; and as `check`.
        """
        tls = connection.scope.get("extensions", {}).get("tls", {})
        if self._mutual and not tls.get("client_cert_name"):
            raise UnauthorizedError("peers need a certificate that an authority of tls_ca has signed")
        self.check(connection, PEER)

    def role_of(self, connection: HTTPConnection) -> str:
        """The caller's roles in one word, `anybody` without a token file; raises as `check`."""
        return "+".join(sorted(self._roles(connection))) if self.guarded else "anybody"

    def check(self, connection: HTTPConnection, roles: tuple[Role, ...]) -> None:
        """Lets the caller pass if its token has one of `roles`.

        Raises:
            UnauthorizedError: no token, or an unknown one.
            ForbiddenError: a token of another role.
        """
        if self.guarded and not self._roles(connection).intersection(roles):
            raise ForbiddenError(f"this needs a token of role {' or '.join(roles)}", roles=list(roles))

    def _roles(self, connection: HTTPConnection) -> frozenset[Role]:
        if self._file is None:
            return frozenset()
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN:
            raise UnauthorizedError("a bearer token is required")
        found = self._file.current().roles(token)
        if not found:
            raise UnauthorizedError("the token is unknown")
        return found


def requires(roles: tuple[Role, ...]) -> Callable[[HTTPConnection], Awaitable[None]]:
    """A FastAPI dependency that lets only callers with one of `roles` pass."""

    async def check(connection: HTTPConnection) -> None:
        security: Security = connection.app.state.security
        security.check(connection, roles)

    return check
