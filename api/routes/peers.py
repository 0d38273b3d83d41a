"""The control connection between two nodes: one WebSocket a move."""

from __future__ import annotations

from typing import Annotated

import structlog
from fastapi import APIRouter, Path, WebSocket

from api import problems
from api.channel import WebSocketChannel
from api.facade import NodeFacade
from api.security import Security
from worldmove.errors import ConnectionLostError, FramingError, UnauthorizedError, WorldMoveError

router = APIRouter()
log = structlog.get_logger("worldmove.http")
MoveId = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]


@router.websocket("/v1/peer/moves/{move_id}")
async def peer(websocket: WebSocket, move_id: MoveId) -> None:
    """Hands one source's connection to the node, and closes it whatever happens."""
    node: NodeFacade = websocket.app.state.node
    security: Security = websocket.app.state.security
    try:
        security.check_peer(websocket)
    except UnauthorizedError as error:
        await websocket.send_denial_response(problems.of_error(error))
        return
    await websocket.accept()
    channel = WebSocketChannel(websocket, move_id)
    code, reason = 1011, "the connection failed at this end"
    try:
        await node.serve_peer(channel)
        code, reason = 1000, ""
    except ConnectionLostError:
        log.info("peer left", move_id=move_id)
    except FramingError as error:
        code, reason = 1002, error.message
    except WorldMoveError as error:
        code, reason = 1011, f"{error.code}: {error.message}"
    finally:
        await channel.close(code, reason)
