"""What the tests of refused moves share: raw requests for moves, and the problems that answer them."""

from __future__ import annotations

from typing import Any

import httpx
from fleet_kit import Node
from fleet_node import PATIENCE_S

from worldmove.manifest import Region

REGIONS = (Region("k", "uint8", (1 << 20,)), Region("odd", "uint8", (333,)))


def ask(node: Node, *, key: str | None = None, dry_run: bool = False, **request: Any) -> httpx.Response:
    """`POST /v1/migrations` of world `w` to node B, or as `request` says; follows nobody to another node."""
    return httpx.post(
        f"{node.url}/v1/migrations",
        json={"session_id": "w", "destination": "B", **request},
        params={"dry_run": "true"} if dry_run else {},
        headers={} if key is None else {"Idempotency-Key": key},
        timeout=PATIENCE_S,
        trust_env=False,
    )


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem that an answer is; it must be this one."""
    assert answer.headers["Content-Type"] == "application/problem+json", answer.text
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["status"], body["code"]) == (status, status, code), body
    assert body["detail"]
    assert (answer.status_code == 429) == ("Retry-After" in answer.headers)
    return body
