"""How two lanes introduce themselves on a new connection, and check that they mean the same."""

from __future__ import annotations

from worldmove.errors import ConnectionLostError, FramingError, TransportError
from worldmove.transport import framing
from worldmove.transport.base import Connection, take
from worldmove.transport.framing import NOBODY, Kind, Opening, ProcessId
from worldmove.transport.table import Sizes


async def _first(connection: Connection, kind: Kind) -> bytes:
    incoming = await connection.receive()
    if incoming is None:
        raise ConnectionLostError("the other side closed instead of introducing itself")
    found = framing.read_tag(incoming.tag, incoming.nbytes, 0)
    if found is Kind.ERROR:
        raise TransportError(f"the other lane refused: {(await take(incoming)).decode(errors='replace')}")
    if found is not kind:
        raise FramingError(f"{found.name} came where {kind.name} is due")
    return await take(incoming)


async def introduce(
    connection: Connection, token: bytes, move_id: str, table: Sizes, me: ProcessId = NOBODY
) -> ProcessId:
    """Opens a connection as destination; the caller sets the deadline.

    Args:
        connection: on which nothing was said yet.
        token: of the lease.
        move_id: of its move.
        table: of this side's regions.
        me: this process, where the source may have to know when it ends.

    Returns:
        Which process the source is.

    Raises:
        TransportError: the source doesn't accept the token, doesn't know it, or has other regions.
    """
    hello = framing.opening(Kind.HELLO, token, move_id, table.digest, me)
    connection.send(framing.tag_of(Kind.HELLO, 0), memoryview(hello))
    body = await _first(connection, Kind.WELCOME)
    theirs = framing.check_opening(body, Kind.WELCOME, token, move_id)
    if theirs.table != table.digest:
        raise FramingError("the regions of the two sides have different sizes")
    return theirs.process


async def examine(connection: Connection, token: bytes, move_id: str) -> Opening:
    """Reads a caller's first message as source; the caller sets the deadline.

    Returns:
        The digest of its region table, and which process it is.

    Raises:
        TransportError: it isn't the expected destination.
    """
    return framing.check_opening(await _first(connection, Kind.HELLO), Kind.HELLO, token, move_id)


async def welcome(
    connection: Connection,
    token: bytes,
    move_id: str,
    table: Sizes,
    theirs: Opening,
    *,
    me: ProcessId = NOBODY,
) -> None:
    """Answers an examined caller.

    Args:
        connection: the caller's.
        token: of the lease.
        move_id: of its move.
        table: of this side's regions.
        theirs: what `examine` has returned.
        me: as for `introduce`.

    Raises:
        FramingError: its regions have other sizes; it was told.
    """
    if theirs.table != table.digest:
        reason = "the regions of the two sides have different sizes"
        connection.send(framing.tag_of(Kind.ERROR, 0), memoryview(reason.encode()))
        await connection.close(1.0)
        raise FramingError(reason)
    body = framing.opening(Kind.WELCOME, token, move_id, table.digest, me)
    await connection.send(framing.tag_of(Kind.WELCOME, 0), memoryview(body))
