"""Who is granted when: a priority queue of moves under a bucket, a bound on bytes and on senders; pure.

Moves whose world stands still come first, and among them the one that has to go on first: it has the whole
line, and its sender sends nothing else while bytes of it are out. Then come moves that copy, by deadline: so
each is served at least as fast as its admission counted on, and what is left goes to whoever is next. Those
of one sender have no more requests out together than one of them would have alone: a world that stops waits
for what is out, and admission counts senders. Nothing overtakes a request that waits for the bound or for
its sender, so a large one is not starved by small ones.

A request is granted when the bucket is out of debt, its sender is among the first `senders` in the order or
answers already, and the bytes out, with it, stay within the bound. A request larger than the bound is granted
when nothing else is out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from itertools import islice
from math import inf

from worldmove.granting.bucket import Bucket
from worldmove.granting.meter import Epoch, Meter
from worldmove.granting.pace import Pace

Key = tuple[bool, float, int]
SCANNED = 64
"""Members that are looked at for a grant: behind so many that wait for landings, one more can wait, too."""


class Request:
    """A wish for `nbytes` of one member; granted once `granted_at` (seconds) is set."""

    __slots__ = ("granted_at", "member", "nbytes", "number", "settled")

    def __init__(self, member: Member, number: int, nbytes: int) -> None:
        self.member = member
        self.number = number
        self.nbytes = nbytes
        self.granted_at: float | None = None
        self.settled = False


class Member:
    """One inbound move at the gate.

    Attributes:
        name: of the move.
        sender: the node that its bytes come from.
        deadline: when it has to be done, in seconds of the caller's clock.
        outstanding: bytes that are granted and neither landed nor given up.
        granted: bytes that were granted in all, without those that were undone.
    """

    def __init__(self, name: str, sender: str, deadline: float, number: int) -> None:
        self.name = name
        self.sender = sender
        self.deadline = deadline
        self.outstanding = 0
        self.granted = 0
        self.left = False
        self._number = number
        self._until: float | None = None
        self.waiting: deque[Request] = deque()
        self.out: dict[int, Request] = {}

    @property
    def present(self) -> bool:
        """It wants bytes, or has grants out."""
        return bool(self.waiting or self.out)

    @property
    def paused(self) -> bool:
        """Its world stands still."""
        return self._until is not None

    @property
    def key(self) -> Key:
        """Its place in the order: the smallest comes first."""
        until = self._until
        return (until is None, self.deadline if until is None else until, self._number)

    def stand(self, until: float | None) -> None:
        """Its world stands, and has to go on at `until`; `None`: it runs (again)."""
        self._until = until


class Policy:
    """All inbound moves of one node.

    Args:
        bucket: paces grants.
        pace: bounds senders and bytes.
        on_epoch: told every measured epoch and the time.
        most_bytes: bytes out at once at most, whatever `pace` finds; `None`: no further bound.
        patience_s: a grant that was out for longer was held up by its sender: no word about the line.
    """

    def __init__(
        self,
        bucket: Bucket,
        pace: Pace,
        on_epoch: Callable[[Epoch, float], None] | None = None,
        *,
        most_bytes: int | None = None,
        patience_s: float = inf,
    ) -> None:
        self.bucket = bucket
        self.pace = pace
        self.outstanding = 0
        self.granted = 0
        self.waiting = 0
        self._most = most_bytes
        self._patience = patience_s
        self._meter = Meter()
        self._numbers = 0
        self._order: list[tuple[Key, Member]] = []
        self._senders: dict[str, int] = {}
        self._paused = 0
        self._crowded = self._tight = self._stood = False
        self.on_epoch = on_epoch or (lambda _epoch, _now: None)

    @property
    def senders(self) -> int:
        """How many answer at this moment."""
        return len(self._senders)

    @property
    def _full(self) -> bool:
        """Whether the line has enough to do for its rate to show."""
        return self.outstanding > 0 and (self.waiting > 0 or 2 * self.outstanding >= self.allowed[1])

    @property
    def allowed(self) -> tuple[int, int]:
        """Senders that may answer at once, and the bound on bytes for all of them."""
        senders, window = self.pace.now_allowed(calm=self._paused == 0)
        return senders, window if self._most is None else min(window, self._most)

    def hold_back(self) -> None:
        """The bound is why somebody asks for less at once: it counts as tight.

        Requests that are cut to fit the bound never wait for it, which would otherwise be how that shows.
        """
        self._tight = True

    def join(self, name: str, sender: str, deadline: float = inf) -> Member:
        """A move comes to the gate."""
        self._numbers += 1
        return Member(name, sender, deadline, self._numbers)

    def stand(self, member: Member, until: float | None) -> None:
        """The move's world stands and must go on at `until`, or runs again (`None`)."""
        if member.left:
            return
        placed = self._drop(member)
        self._paused += (until is not None) - member.paused
        member.stand(until)
        self._stood |= member.paused
        if placed:
            self._place(member)

    def leave(self, member: Member, now: float) -> list[Request]:
        """The move is over, however it ended: what it held and asked for goes back.

        Grants that are out come to nothing: the time until others' bytes come says nothing about the line.

        Returns:
            The requests that were not granted yet.
        """
        if member.left:
            return []
        self._drop(member)
        self._paused -= member.paused
        member.left = True
        forgotten = list(member.waiting)
        for request in forgotten:
            request.settled = True
        member.waiting.clear()
        self.waiting -= len(forgotten)
        for request in list(member.out.values()):
            self.give_back(request, now)
        return forgotten

    def ask(self, member: Member, nbytes: int) -> Request:
        """A member wants bytes; `due` says when it is granted."""
        self._numbers += 1
        request = Request(member, self._numbers, nbytes)
        if member.left:
            request.settled = True
            return request
        present = member.present
        member.waiting.append(request)
        self.waiting += 1
        if not present:
            self._place(member)
        return request

    def withdraw(self, request: Request) -> None:
        """The member doesn't want it any more; it was not granted yet."""
        member = request.member
        if request in member.waiting:
            member.waiting.remove(request)
            request.settled = True
            self.waiting -= 1
            self._drop_absent(member)

    def due(self, now: float) -> tuple[list[Request], float | None]:
        """What is granted at `now`, and after how many seconds to ask again.

        `None`: not before something lands, is given back or asked for.
        """
        granted: list[Request] = []
        while (request := self._next()) is not None:
            wait = self.bucket.delay(now)
            if wait > 0:
                return granted, wait
            self._grant(request, now)
            granted.append(request)
        return granted, None

    def landed(self, request: Request, now: float) -> None:
        """The bytes of a grant have arrived."""
        if request.settled:
            return
        self._return(request)
        if request.granted_at is not None and now - request.granted_at > self._patience:
            self._meter.broken(self._senders, now, full=self._full)
            return
        epoch = self._meter.landed(request.nbytes, now, full=self._full)
        if epoch is not None:
            self.on_epoch(epoch, now)
            crowded, tight = self._crowded, self._tight
            self.pace.heard(epoch, crowded=crowded, tight=tight, now=now, calm=not self._stood)
            self._crowded = self._tight = False
            self._stood = self._paused > 0
            self._meter.restart(self._senders)

    def give_back(self, request: Request, now: float) -> None:
        """The bytes of a grant will not arrive any more: whoever should send them can't."""
        if not request.settled:
            self._return(request)
            self._meter.broken(self._senders, now, full=self._full)

    def undo(self, request: Request, now: float) -> None:
        """A grant was never used: nobody was asked to send its bytes."""
        if not request.settled:
            self.give_back(request, now)
            self.granted -= request.nbytes
            request.member.granted -= request.nbytes
            self.bucket.refund(request.nbytes, now)

    def overdue(self, now: float, patience_s: float) -> list[Request]:
        """Grants that have been out for longer than `patience_s`."""
        out = (request for _, member in self._order for request in member.out.values())
        return [one for one in out if one.granted_at is not None and now - one.granted_at > patience_s]

    def _next(self) -> Request | None:
        senders, bound = self.allowed
        chosen: set[str] = set()
        held: set[str] = set()
        for _, member in islice(self._order, SCANNED):
            if member.sender in held:
                continue
            if member.sender not in chosen and len(chosen) >= senders:
                self._crowded = True
                continue
            chosen.add(member.sender)
            if not member.waiting:
                if member.paused:  # what else its sender sent would come between its own bytes
                    held.add(member.sender)
                continue
            if member.sender not in self._senders and len(self._senders) >= senders:
                continue  # its place is being vacated
            width = len(member.waiting) + len(member.out)
            shared = not (member.paused or self.pace.still)  # where lanes bound themselves nobody waits
            if shared and self._senders.get(member.sender, 0) >= width:
                held.add(member.sender)
                continue
            request = member.waiting[0]
            if self.outstanding and self.outstanding + request.nbytes > bound:
                self._tight = True
                return None
            return request
        return None

    def _grant(self, request: Request, now: float) -> None:
        member = request.member
        member.waiting.popleft()
        member.out[request.number] = request
        request.granted_at = now
        self.bucket.take(request.nbytes, now)
        self.waiting -= 1
        self.outstanding += request.nbytes
        self.granted += request.nbytes
        member.outstanding += request.nbytes
        member.granted += request.nbytes
        self._senders[member.sender] = self._senders.get(member.sender, 0) + 1
        self._meter.granted(len(self._senders), member.sender, now, full=self._full)

    def _return(self, request: Request) -> None:
        request.settled = True
        member = request.member
        del member.out[request.number]
        self.outstanding -= request.nbytes
        member.outstanding -= request.nbytes
        left = self._senders[member.sender] - 1
        if left:
            self._senders[member.sender] = left
        else:
            del self._senders[member.sender]
        self._drop_absent(member)

    def _place(self, member: Member) -> None:
        if member.present:
            insort(self._order, (member.key, member), key=lambda pair: pair[0])

    def _drop(self, member: Member) -> bool:
        """Takes a member out of the order; whether it was there."""
        at = bisect_left(self._order, member.key, key=lambda pair: pair[0])
        if at < len(self._order) and self._order[at][1] is member:
            del self._order[at]
            return True
        return False

    def _drop_absent(self, member: Member) -> None:
        if not member.present:
            self._drop(member)
