"""TLS of a node and of its clients; certificates are read again when their files change.

The server asks every caller for a certificate where a CA is given, and takes callers without one: the
control connections of peers need one of that CA (`api.security`), REST clients need only their token.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from worldmove.errors import ConfigError

if TYPE_CHECKING:
    from worldmove.config import Settings

KEY_ALLOWED = "the PEM key of tls_cert, without a passphrase, that only its user (and group) can read"


class Identity(NamedTuple):
    """A certificate (PEM, with its intermediates) and its private key."""

    cert: Path
    key: Path


def client_context(ca: Path | str | None = None, identity: Identity | None = None) -> ssl.SSLContext:
    """What a client trusts, and who it is.

    Args:
        ca: PEM file of the authorities that are trusted; the system's own if left out.
        identity: shown to servers that ask for a certificate.

    Raises:
        ConfigError: a file can't be used.
    """
    context = ssl.create_default_context() if ca is None else _trusting(ca)
    if identity is not None:
        _load_identity(context, identity)
    return context


class NodeTls:
    """The contexts of one node.

    Args:
        identity: of the node; `None` where it doesn't serve TLS itself.
        ca: whom it trusts as peers, in both directions; the system's authorities if left out, and then
            callers are not asked for a certificate.

    Raises:
        ConfigError: a file can't be used.
    """

    def __init__(self, identity: Identity | None, ca: Path | None) -> None:
        self._identity = identity
        self._ca = ca
        self._stamps = self._look()
        self._client = client_context(ca, identity)
        self._server = self._make_server() if identity is not None else None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """As the settings say; raises as the constructor."""
        cert, key = settings.tls_cert, settings.tls_key
        return cls(Identity(cert, key) if cert is not None and key is not None else None, settings.tls_ca)

    @property
    def client(self) -> ssl.SSLContext:
        """For connections to other nodes."""
        self._refresh()
        return self._client

    def server(self) -> ssl.SSLContext:
        """For the listening socket. Each handshake gets what the files hold by then.

        Raises:
            ConfigError: the node has no certificate.
        """
        if self._server is None:
            raise ConfigError("tls_cert is missing; a PEM certificate is needed", option="tls_cert")
        outer = self._server

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext) -> None:
            self._refresh()
            if self._server is not None and self._server is not outer:
                connection.context = self._server

        # OpenSSL calls this for every handshake, also of callers that name no server.
        outer.sni_callback = choose
        return outer

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        paths = [*(self._identity or ()), *([self._ca] if self._ca else [])]
        found = []
        for path in paths:
            try:
                status = path.stat()
            except OSError:
                # While a file is being replaced, and afterwards, the last good one counts.
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _refresh(self) -> None:
        stamps = self._look()
        if stamps == self._stamps:
            return
        try:
            client = client_context(self._ca, self._identity)
            server = self._make_server() if self._identity is not None else None
        except ConfigError:
            # A half-written pair: the last good one stays in force, and the next handshake looks again.
            return
        self._stamps, self._client, self._server = stamps, client, server

    def _make_server(self) -> ssl.SSLContext:
        assert self._identity is not None  # noqa: S101 - callers have checked
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session skips the certificate: one that was taken away would still be let in.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        _load_identity(context, self._identity)
        if self._ca is not None:
            _load_ca(context, self._ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def _trusting(ca: Path | str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_ca(context, ca)
    return context


def _load_ca(context: ssl.SSLContext, ca: Path | str) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_ca is {str(ca)!r} ({_why(error)}); a PEM file of certificates is allowed",
            option="tls_ca",
            value=str(ca),
        ) from error


def _load_identity(context: ssl.SSLContext, identity: Identity) -> None:
    cert, key = identity
    try:
        mode = key.stat().st_mode
        if mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP):
            raise ConfigError(
                f"tls_key is {str(key)!r} (mode {stat.S_IMODE(mode):04o}); allowed: {KEY_ALLOWED}",
                option="tls_key",
                value=str(key),
            )
        # Without an answer OpenSSL would ask for a passphrase at the terminal.
        context.load_cert_chain(os.fspath(cert), os.fspath(key), password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert {str(cert)!r} and tls_key {str(key)!r} can't be used ({_why(error)}); allowed: a PEM "
            f"certificate, and {KEY_ALLOWED}",
            option="tls_cert",
            value=str(cert),
        ) from error


def _why(error: OSError | ValueError) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or type(error).__name__)
