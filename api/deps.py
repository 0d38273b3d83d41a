"""What handlers ask for: the node, page cursors, ids, and answers made of views."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, TypeVar

import msgspec
from fastapi import Depends, Header, Path, Query
from fastapi.sse import ServerSentEvent
from starlette.requests import HTTPConnection
from starlette.responses import Response

from api import problems
from api.facade import NodeFacade
from worldmove.errors import WorldMoveError

MAX_PAGE = 1000
T = TypeVar("T")


async def _node(connection: HTTPConnection) -> NodeFacade:
    node: NodeFacade = connection.app.state.node
    return node


async def _stopping(connection: HTTPConnection) -> asyncio.Event:
    event: asyncio.Event = connection.app.state.stopping
    return event


NodeDep = Annotated[NodeFacade, Depends(_node)]
Stopping = Annotated[asyncio.Event, Depends(_stopping)]
IdPath = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
After = Annotated[str | None, Query(max_length=256, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most entries of one page.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=128,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key with the same body gives the same move; with another body a 422.",
    ),
]


def answer(view: object, status: int = 200, **headers: str) -> Response:
    """A view as JSON."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(msgspec.json.encode(view), status, named, "application/json")


async def stream(
    stopping: asyncio.Event, items: AsyncIterator[T], shown: Callable[[T], ServerSentEvent]
) -> AsyncIterator[ServerSentEvent]:
    """Events of `items`; an error after the start of the stream becomes its last event, a `problem`."""
    try:
        async for item in until(stopping, items):
            yield shown(item)
    except WorldMoveError as error:
        problem = bytes(problems.of_error(error).body).decode()
        yield ServerSentEvent(event="problem", raw_data=problem)


async def until(stopping: asyncio.Event, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Passes `items` on until they end or the node stops, so that no open stream holds a shutdown up."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while not stopping.is_set():
            following = asyncio.ensure_future(anext(items, None))
            try:
                await asyncio.wait((stop, following), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await following
            if following.cancelled() or (item := following.result()) is None:
                return
            yield item
    finally:
        stop.cancel()
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
