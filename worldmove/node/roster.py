"""The moves of one node by id: those under way, and the last ones that have ended.

A move within this node has both its halves here, under one id: the source's is the one that is shown.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator

from worldmove.destination import DestinationMove
from worldmove.errors import NotFoundError
from worldmove.node.metrics import Metrics
from worldmove.node.moveviews import of_destination, of_source
from worldmove.protocol import State
from worldmove.source import SourceMove
from worldmove.views import MigrationPage, MigrationView

REMEMBERED = 1000
LOOK_S = 0.2

AnyMove = SourceMove | DestinationMove


class Roster:
    """Remembers moves; counts those that end.

    Args:
        node: whose.
        metrics: told of each end.
    """

    def __init__(self, node: str, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics
        self._running: dict[str, AnyMove] = {}
        self._arriving: dict[str, DestinationMove] = {}
        self._ended: OrderedDict[str, MigrationView] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running) + len(self._arriving)

    def __iter__(self) -> Iterator[AnyMove]:
        return iter([*self._running.values(), *self._arriving.values()])

    def running(self, move_id: str) -> AnyMove | None:
        """A move under way; of one within this node, the source's half."""
        return self._running.get(move_id)

    def arriving(self, move_id: str) -> AnyMove | None:
        """The half of a move that brings a session here."""
        return self._arriving.get(move_id) or self._running.get(move_id)

    def ended(self, move_id: str) -> MigrationView | None:
        """A move that has ended, as it was last shown."""
        return self._ended.get(move_id)

    def may_open(self, move_id: str, *, within: bool) -> bool:
        """Whether a destination's half may begin: once, and `within` this node only of a move that runs."""
        if not within:
            return move_id not in self._running and move_id not in self._ended
        return isinstance(self._running.get(move_id), SourceMove) and move_id not in self._arriving

    def keep(self, move: AnyMove) -> None:
        """Remembers a move that begins."""
        if isinstance(move, DestinationMove) and move.move_id in self._running:
            self._arriving[move.move_id] = move
        else:
            self._running[move.move_id] = move
        move.done.add_done_callback(lambda _done: self._forget(move))

    async def drained(self, patience_s: float) -> None:
        """Returns once every move is over, which none that waits for others can put off for ever.

        One that has waited for `patience_s` for the ledger's word is left to the record, as if the node had
        died: its next incarnation goes by it. One that has waited so long for a boundary is given up.
        """
        since: dict[AnyMove, float] = {}
        while moves := list(self):
            now = time.monotonic()
            for move in moves:
                if not (move.waits_for_ledger or move.machine.state is State.PAUSING):
                    since.pop(move, None)
                elif now - since.setdefault(move, now) < patience_s:
                    continue
                elif move.waits_for_ledger:
                    move.log.warning("the ledger does not answer; the move is left to its record")
                    await move.abandon()
                else:
                    move.fail("shutting-down", "a node of the move is shutting down")
            await asyncio.wait([move.done for move in moves], timeout=LOOK_S)

    def _forget(self, move: AnyMove) -> None:
        view = self.view(move)
        self._metrics.move_ended(move.role, view)
        if self._arriving.get(move.move_id) is move:
            del self._arriving[move.move_id]
            return
        self._running.pop(move.move_id, None)
        self._ended[move.move_id] = view
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def view(self, move: AnyMove) -> MigrationView:
        """A move as it is shown."""
        return of_source(move) if isinstance(move, SourceMove) else of_destination(move, self._node)

    def page(self, after: str | None, limit: int) -> MigrationPage:
        """Running moves, then ended ones, newest first.

        Raises:
            NotFoundError: nobody knows `after`.
        """
        running = [self.view(move) for move in reversed(self._running.values())]
        known = {view.id: view for view in [*running, *reversed(self._ended.values())]}
        views = list(known.values())
        ids = [view.id for view in views]
        if after is not None and after not in known:
            raise NotFoundError(f"migration {after!r} is not known")
        start = ids.index(after) + 1 if after is not None else 0
        page = tuple(views[start : start + limit])
        more = start + limit < len(views)
        return MigrationPage(migrations=page, next=page[-1].id if more and page else None)
