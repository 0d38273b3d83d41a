"""Liveness, readiness, metrics, this node and the nodes it knows."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from api import problems
from api.deps import NodeDep, answer
from api.openapi import describes
from api.security import ANYBODY, requires
from worldmove.errors import LedgerError
from worldmove.views import NodeView

router = APIRouter(tags=["node"])
_ANYBODY = [Depends(requires(ANYBODY))]


@router.get("/v1/healthz", responses=describes(200, "Health"))
async def healthz() -> Response:
    """Is the process alive? Asks nothing of anybody."""
    return answer({"status": "ok"})


@router.get("/v1/readyz", responses=describes(200, "Ready") | problems.unready())
async def readyz(node: NodeDep) -> Response:
    """Can the node accept moves? Lanes and executors are up, the ledger answers."""
    missing = await node.ready()
    if missing:
        return problems.response(503, "not-ready", "; ".join(missing), {"missing": missing})
    return answer({"ready": True})


@router.get("/metrics", dependencies=_ANYBODY, response_class=Response)
async def metrics(node: NodeDep) -> Response:
    """Prometheus text; docs/metrics.md describes each metric."""
    return Response(node.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/node", dependencies=_ANYBODY, responses=describes(200, NodeView))
async def this_node(node: NodeDep) -> Response:
    """This node: devices, measured rates, gate, memory, lanes."""
    return answer(await node.view())


@router.get(
    "/v1/nodes",
    dependencies=_ANYBODY,
    responses=describes(200, "Nodes") | problems.documented(LedgerError),
)
async def nodes(node: NodeDep) -> Response:
    """The nodes of the fleet, as the ledger knows them."""
    return answer({"nodes": await node.nodes()})
