"""Which nodes are alive, judged by one observer's own monotonic clock; pure."""

from __future__ import annotations

from collections.abc import Iterable

from worldmove.ledger.records import NodeInfo


class Liveness:
    """Remembers when each node's beat was last seen to change; no two clocks are compared.

    A node seen for the first time counts as alive: the observer cannot know better yet, and a wrong guess
    costs one refused connection. `timeout_s` is how long a beat may stand still, seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[str, tuple[int, int, float]] = {}

    def observe(self, nodes: Iterable[NodeInfo], now: float) -> dict[str, bool]:
        """Which of `nodes` (all that the ledger lists) are alive at `now`; others are forgotten."""
        seen: dict[str, tuple[int, int, float]] = {}
        for node in nodes:
            last = self._seen.get(node.name)
            same = last is not None and last[:2] == (node.incarnation, node.beat)
            seen[node.name] = last if last is not None and same else (node.incarnation, node.beat, now)
        self._seen = seen
        return {name: now - since <= self._timeout_s for name, (_, _, since) in seen.items()}
