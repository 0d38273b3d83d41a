"""A rank's connection to its node: fetching descriptors, and finding the node again when it was gone."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from worldmove.errors import (
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    TransportError,
    WorldMoveError,
)
from worldmove.ipc import SyncChannel, close_all
from worldmove.page.control import ControlPage, open_own
from worldmove.page.messages import (
    Ended,
    Hello,
    Memory,
    Message,
    Moved,
    NodeMessage,
    Ping,
    Pong,
    Ready,
    Refused,
    Rejoin,
    Revise,
    Welcome,
)
from worldmove.sdk.handback import Kept
from worldmove.sdk.problems import error_of

ENTER_S = 60.0
"""How long the node may take to hand over a rank's descriptors."""
LOOK_S = 0.5
"""How often a running rank looks whether its node is still the same one."""
BACKOFF_S = 0.05, 1.0

M = TypeVar("M")
Word = Welcome | Moved | Ended
"""The first that a rank hears that comes back and is not refused."""


class Standing(NamedTuple):
    """Where a rank is, as `Rejoin` says it."""

    block: int
    stopped: bool
    waiting: bool


class Link:
    """One rank's connection.

    Attributes:
        page: the control page in force; another one after the node has started again.
        welcome: what the node said at first.
        kept: what to hand back to a node that knows nothing of this rank.
        over: what a node has said that this rank came back to: its session is not here any more.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.page: ControlPage
        self.welcome: Welcome
        self.kept: Kept
        self.over: Moved | Ended | None = None
        self._page_fd = -1
        self._inode = 0
        self._sock: socket.socket | None = None
        self._channel: SyncChannel[NodeMessage] | None = None
        self._returning: SyncChannel[NodeMessage] | None = None
        self._revisions: list[tuple[Revise, list[int]]] = []
        self._sent = 0

    @classmethod
    def enter(cls, path: str, token: str) -> tuple[Link, list[int]]:
        """Comes with a one-time token.

        Returns:
            The link, on which `ready` is still to be said, and descriptors for `welcome.extents`, which the
            caller owns.

        Raises:
            UnauthorizedError, ConflictError, NotFoundError: the node refused.
            ConnectionLostError: no node listens there, or it went away meanwhile.
        """
        link = cls(path)
        fds: list[int] = []
        try:
            channel = link._connect()
            channel.send(Hello(token))
            link.welcome, carried = _expect(channel, Welcome)
            link.kept = Kept(link.welcome.manifest)
            link._take_page(carried)
            link._sent = link.welcome.revisions
            while len(fds) < len(link.welcome.extents):
                fds += _expect(channel, Memory)[1]
            _check_count(fds, len(link.welcome.extents))
            _forget_in_children(link)
        except BaseException:
            close_all(fds)
            link.close()
            raise
        return link, fds

    def ready(self) -> None:
        """Says that everything is mapped; from now on the rank has this worker.

        Raises:
            ConflictError: another living process has the rank.
            ConnectionLostError: the node went away.
        """
        self.page.occupy(self.welcome.rank)
        self._open_channel().send(Ready())

    def _connect(self, *, wait: bool = True) -> SyncChannel[NodeMessage]:
        try:
            # Noted before connecting: if the node is replaced in between, the next look finds out.
            self._inode = Path(self.path).stat().st_ino
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ConnectionLostError(f"no node at {self.path}: {error}") from error
        try:
            # Only a node with a full queue makes a caller wait, and a running rank does not.
            sock.settimeout(LOOK_S if wait else 0.0)
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            raise ConnectionLostError(f"no node at {self.path}: {error}") from error
        self._sock = sock
        self._channel = SyncChannel(sock, NodeMessage)
        return self._channel

    def _open_channel(self) -> SyncChannel[NodeMessage]:
        if self._channel is None:
            raise ConnectionLostError("the node is away")
        return self._channel

    def _take_page(self, fds: Sequence[int]) -> None:
        """Maps the page that came along; the words of an older one are carried over."""
        own = -1
        try:
            _check_count(fds, 1)
            own = open_own(fds[0])
            page = ControlPage(own)
        except BaseException:
            close_all([own] if own >= 0 else [])
            raise
        finally:
            close_all(fds)
        if self._page_fd >= 0:
            page.copy_rank(self.page, self.welcome.rank)
            self.page.close()
            os.close(self._page_fd)
        self.page, self._page_fd = page, own

    # Talking

    def tell(self, message: Message) -> None:
        """Sends what nobody waits for; nothing if the node is away."""
        try:
            self._open_channel().send(message)
        except ConnectionLostError:
            self._drop_channel()

    def ask(
        self, message: Message | None, standing: Standing, timeout: float | None = None
    ) -> NodeMessage | None:
        """Sends `message` and waits for the node's word, also across its restarts; answers its pings.

        A rank that stands waits as long as it takes: only the node, which asks the ledger, may say whether
        it still owns its world.

        Args:
            message: `None` to wait only.
            standing: told to a node that has started again.
            timeout: seconds; `None` waits for ever, 0 takes what is there.

        Returns:
            The answer; `None` after `timeout`.

        Raises:
            WorldMoveError: a new node refused the rank.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if message is not None:
            self.tell(message)
        while True:
            left = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
            if self._channel is None and not self._come_back(standing, deadline):
                return None
            if self.over is not None:
                return self.over
            try:
                got = self._open_channel().receive(timeout=left)
            except ConnectionLostError:
                self._drop_channel()
                continue
            if got is not None:
                close_all(got[1])
                if not isinstance(got[0], Ping):
                    return got[0]
                self.tell(Pong(got[0].number))
            elif left == 0:
                return None
            elif self._replaced():
                self._drop_channel()

    def _come_back(self, standing: Standing, deadline: float | None) -> bool:
        wait, longest = BACKOFF_S
        while True:
            try:
                channel = self._connect()
                self._greet(channel, standing)
                word: tuple[Word, list[int]] = _expect(channel, Welcome, Moved, Ended)
                self._received(*word)
            except TransportError:
                self._drop_channel()
            except WorldMoveError as error:
                self._drop_channel()
                if self.kept.refused(self.page, error):
                    continue
            else:
                return True
            if deadline is not None and time.monotonic() + wait >= deadline:
                return False
            time.sleep(wait)
            wait = min(2 * wait, longest)

    def _greet(self, channel: SyncChannel[NodeMessage], standing: Standing) -> None:
        rejoin, page = self._rejoin(standing), (self.page, self._page_fd)
        if self.kept.offering:
            self.kept.hand_back(channel, rejoin, page, self.welcome.fingerprint, self._sent)
        else:
            channel.send(rejoin)

    # A running rank whose node has gone

    def look(self, block: int) -> bool:
        """Looks after the connection without waiting; a running rank calls it now and then at a boundary.

        Returns:
            Whether the control page is another one from now on.
        """
        try:
            if self._returning is not None:
                return self._poll_return()
            if self._channel is not None and not self._dead() and not self._replaced():
                return False
            self._drop_channel()
            channel = self._connect(wait=False)
            self._channel = None
            self._returning = channel
            self._greet(channel, Standing(block, stopped=False, waiting=False))
        except WorldMoveError:
            # The world goes on without a node; the next look tries again.
            self._drop_channel()
        return False

    def _poll_return(self) -> bool:
        channel = self._returning
        got = channel.receive(timeout=0.0) if channel is not None else None
        if channel is None or got is None:
            return False
        if self._sock is not None:
            self._sock.setblocking(True)
        message, fds = got
        if not isinstance(message, Word):
            close_all(fds)
            if isinstance(message, Refused):
                self.kept.unknown(self.page, message.code)
            raise ConnectionLostError("the new node does not know this rank")
        self._channel, self._returning = channel, None
        self._received(message, fds)
        return self.over is None

    def _received(self, welcome: Word, fds: Sequence[int]) -> None:
        """Takes a new incarnation's page, and repeats what the old one has not written down."""
        if not isinstance(welcome, Welcome):
            close_all(fds)
            self.over = welcome
            return
        if welcome.slot != self.welcome.slot or welcome.rank != self.welcome.rank:
            close_all(fds)
            raise ProtocolError("the node answered for another rank")
        self.kept.offering = False
        self._take_page(fds)
        self.ready()
        self._forget_known()
        for revision, carried in self._revisions:
            self._open_channel().send(revision, carried)

    def _rejoin(self, standing: Standing) -> Rejoin:
        first = self.welcome
        page = self.page
        return Rejoin(first.slot, first.rank, first.secret, *standing, page.session_id, page.epoch)

    def _dead(self) -> bool:
        if self._sock is None:
            return True
        # A time limit, left over from waiting, would make even a peek wait.
        self._sock.setblocking(False)
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._sock.setblocking(True)

    def _replaced(self) -> bool:
        """Whether another incarnation listens at the path: this one may be stopped and yet not dead."""
        try:
            return Path(self.path).stat().st_ino != self._inode
        except OSError:
            return False

    # Revisions

    def revise(self, revision: Revise, fds: list[int]) -> None:
        """Sends a revision, and again to the next node if this one has not written it down; owns `fds`."""
        self._forget_known()
        self._sent += 1
        revision = msgspec.structs.replace(revision, number=self._sent)
        self._revisions.append((revision, fds))
        try:
            self._open_channel().send(revision, fds)
        except ConnectionLostError:
            self._drop_channel()

    def _forget_known(self) -> None:
        known = self.page.revisions(self.welcome.rank)
        while self._revisions and self._revisions[0][0].number <= known:
            close_all(self._revisions.pop(0)[1])

    # Ending

    def _drop_channel(self) -> None:
        for channel in (self._channel, self._returning):
            if channel is not None:
                channel.close()
        self._channel = self._returning = self._sock = None

    def close(self) -> None:
        """Ends the connection and gives the rank free."""
        self._drop_channel()
        for _, fds in self._revisions:
            close_all(fds)
        self._revisions.clear()
        if self._page_fd >= 0:
            self.page.close()
            os.close(self._page_fd)
            self._page_fd = -1


def _forget_in_children(link: Link) -> None:
    """A forked child must not keep connection and lock alive when the worker dies."""
    reference = weakref.ref(link)

    def forget() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=forget)


def _check_count(fds: Sequence[int], announced: int) -> None:
    if len(fds) != announced:
        raise ProtocolError(f"the node sent {len(fds)} descriptors and announced {announced}")


def _expect(channel: SyncChannel[NodeMessage], *kinds: type[M]) -> tuple[M, list[int]]:
    got = channel.receive(timeout=ENTER_S)
    if got is None:
        raise DeadlineError(f"the node did not answer within {ENTER_S:g} s")
    message, fds = got
    if isinstance(message, kinds):
        return message, fds
    close_all(fds)
    if isinstance(message, Refused):
        raise error_of(message.code, message.message)
    raise ProtocolError(f"the node sent {type(message).__name__} instead of {kinds[0].__name__}")
