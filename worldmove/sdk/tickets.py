"""Tickets with which the processes of a world's other ranks join it."""

from __future__ import annotations

import msgspec

from worldmove.errors import ValidationError


class Ticket(msgspec.Struct, frozen=True):
    """What another rank's process needs to join; a string for the way there."""

    id: str
    socket: str
    rank: int
    token: str

    def __repr__(self) -> str:
        return f"Ticket(id={self.id!r}, rank={self.rank})"


def write_ticket(ticket: Ticket) -> str:
    """The ticket as one line of JSON."""
    return msgspec.json.encode(ticket).decode()


def read_ticket(text: str) -> Ticket:
    """The ticket of `write_ticket`.

    Raises:
        ValidationError: it is none.
    """
    try:
        return msgspec.json.decode(text, type=Ticket)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValidationError("the text is no ticket", field="ticket") from error
