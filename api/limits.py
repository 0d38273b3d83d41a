"""How often one client may register and ask for moves: a token bucket for each role and address."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.requests import HTTPConnection

from api.security import Security
from worldmove.config import Settings
from worldmove.errors import RateLimitedError

BURST_S = 5.0
"""A client that was quiet may catch up so many seconds of its rate at once."""
MAX_CLIENTS = 4096
"""Clients remembered at once; beyond it the one that was quiet longest starts afresh."""
IPV6_SITE = 64
"""An IPv6 host has a whole prefix of so many bits to itself."""

Kind = Literal["register", "move"]


class Buckets:
    """Token buckets by client, each kept as one number: when it will be full again (GCRA).

    Args:
        rate: calls a second; 0: no limit.
        clients: most that are remembered.
    """

    def __init__(self, rate: float, clients: int = MAX_CLIENTS) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._clients = clients
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: str, now: float) -> float:
        """Takes one call.

        Args:
            client: whose bucket.
            now: seconds of a monotonic clock.

        Returns:
            0 if the call is allowed, else the seconds until one would be.
        """
        if not self._interval:
            return 0.0
        full_at = max(self._full_at.pop(client, now), now)
        wait = full_at - now - BURST_S
        self._full_at[client] = full_at if wait > 0 else full_at + self._interval
        while len(self._full_at) > self._clients:
            self._full_at.popitem(last=False)
        return max(wait, 0.0)


class Limits:
    """The buckets of one app."""

    def __init__(self, settings: Settings) -> None:
        self._buckets: dict[Kind, Buckets] = {
            "register": Buckets(settings.register_rate),
            "move": Buckets(settings.move_rate),
        }

    def check(self, kind: Kind, client: str) -> None:
        """Takes one call of `client`.

        Raises:
            RateLimitedError: it has called too often.
        """
        wait_s = self._buckets[kind].take(client, time.monotonic())
        if wait_s > 0:
            raise RateLimitedError(
                f"too many calls of this kind ({kind}) by this client", retry_after_ms=wait_s * 1000
            )


def client_of(connection: HTTPConnection) -> str:
    """The address that a call came from; of an IPv6 address the site."""
    return site_of(connection.client.host if connection.client is not None else "")


def site_of(host: str) -> str:
    """An address as one client: itself, or the site of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(ipaddress.ip_network((address, IPV6_SITE), strict=False))


def limited(kind: Kind) -> Callable[[HTTPConnection], Awaitable[None]]:
    """A FastAPI dependency that lets a client pass only so often; stands after the check of its role."""

    async def check(connection: HTTPConnection) -> None:
        security: Security = connection.app.state.security
        limits: Limits = connection.app.state.limits
        limits.check(kind, f"{security.role_of(connection)} {client_of(connection)}")

    return check
