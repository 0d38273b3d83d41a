"""How clients of a node's HTTP interface reach it: whom they trust, and how long a connection may rest."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypedDict

import httpx

from worldmove.tls import client_context

IDLE_S = 2.0
"""A connection that has rested for longer is not used again.

Nodes close those that rest for some seconds (`api.serve`). Where both sides wait as long, a request may leave
just as its connection is closed, and nobody can say whether it was carried out.
"""


class HttpOptions(TypedDict):
    """Arguments of `httpx.Client` and `httpx.AsyncClient`."""

    headers: dict[str, str]
    timeout: float
    trust_env: bool
    verify: ssl.SSLContext
    limits: httpx.Limits


def http_options(token: str | None, timeout_s: float, tls_ca: Path | str | None = None) -> HttpOptions:
    """What every client of ours is made with.

    Args:
        token: bearer token; `None`: none is shown.
        timeout_s: for an answer, in seconds.
        tls_ca: PEM file of the authorities that are trusted; the system's own if left out.

    Raises:
        ConfigError: `tls_ca` can't be used.
    """
    return HttpOptions(
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        timeout=timeout_s,
        # A proxy from the environment would be shown the token, and can't reach this host's loopback.
        trust_env=False,
        verify=client_context(tls_ca),
        limits=httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=IDLE_S),
    )
