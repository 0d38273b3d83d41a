"""One-time tokens with which a rank proves at the door that it was registered."""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

from worldmove.errors import UnauthorizedError


class Claim(NamedTuple):
    """What a token stands for."""

    slot: str
    rank: int


class TicketBook:
    """Outstanding tokens. A token is `<name>.<secret>`: found by its name, compared by its secret."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, Claim]] = {}
        self._of: dict[str, dict[int, str]] = {}

    def issue(self, slot: str, rank: int) -> str:
        """A new token; an earlier one for the same rank is void."""
        claim = Claim(slot, rank)
        self._void(claim)
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._open[name] = (secret, claim)
        self._of.setdefault(slot, {})[rank] = name
        return f"{name}.{secret}"

    def redeem(self, token: str) -> Claim:
        """What the token stands for; it is used up.

        Raises:
            UnauthorizedError: unknown, wrong or used up.
        """
        name, _, secret = token.partition(".")
        known, claim = self._open.get(name, ("", None))
        if not hmac.compare_digest(known.encode(), secret.encode()) or claim is None:
            raise UnauthorizedError("the token is unknown or used up")
        self._void(claim)
        return claim

    def void(self, slot: str) -> None:
        """Forgets every token of a slot."""
        for name in self._of.pop(slot, {}).values():
            del self._open[name]

    def _void(self, claim: Claim) -> None:
        names = self._of.get(claim.slot, {})
        name = names.pop(claim.rank, None)
        if name is not None:
            del self._open[name]
        if not names:
            self._of.pop(claim.slot, None)
