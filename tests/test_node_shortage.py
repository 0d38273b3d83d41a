"""A node that may open few descriptors: registrations beyond them are refused, everything else goes on."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import httpx

from worldmove.bench.nodes import running_nodes

ROOM = 20
SPARE = 256
BODY: dict[str, Any] = {
    "model": "m",
    "regions": [{"name": "k", "dtype": "uint8", "shape": [4096]}],
    "block_ms": 100.0,
    "horizon_ms": 1000.0,
}
OPTIONS = ("--path", "local", "--register-rate", "0")


def held(pid: int) -> int:
    """The lowest descriptor that the process would get next, less one: those it has, less gaps."""
    numbers = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


async def test_registrations_end_in_a_clear_refusal(tmp_path: Path) -> None:
    async with (
        running_nodes(("A",), OPTIONS, logs=tmp_path) as (node,),
        httpx.AsyncClient(base_url=node.url, timeout=30, trust_env=False) as client,
    ):
        made: list[str] = []
        limit = held(node.pid) + ROOM + SPARE
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (limit, limit))
        while (answer := await client.post("/v1/sessions", json=BODY)).is_success:
            made.append(answer.json()["id"])
            assert len(made) < 2 * ROOM
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (429, "no-memory")
        assert problem["required"] > problem["available"] >= 0
        assert "LimitNOFILE" in problem["detail"]
        assert len(made) >= 3
        page = (await client.get("/v1/sessions")).json()
        assert sorted(view["id"] for view in page["sessions"]) == sorted(made)
        assert (await client.get("/v1/readyz")).is_success
        (await client.delete(f"/v1/sessions/{made[0]}")).raise_for_status()
        (await client.delete(f"/v1/sessions/{made[1]}")).raise_for_status()
        again = await client.post("/v1/sessions", json=BODY)
        while again.status_code == 429:  # the descriptors of what has ended are closed beside the loop
            again = await client.post("/v1/sessions", json=BODY)
        assert again.is_success
    assert "Too many open files" not in (tmp_path / "A.log").read_text()
