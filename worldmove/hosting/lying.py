"""Which slots lie on a node: by key, by session, by standby."""

from __future__ import annotations

from worldmove.errors import NotFoundError
from worldmove.hosting.slots import Slot


class Lying:
    """The slots of a host.

    Attributes:
        by_key: all of them; of a session that moves within the node, two.
        sessions: by session id. standbys: by the standby's id, until adopted.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, Slot] = {}
        self.sessions: dict[str, Slot] = {}
        self.standbys: dict[str, Slot] = {}

    def add(self, slot: Slot) -> None:
        """A slot that lies here from now on, under its id too.

        After a move within this node a session may have two: the later epoch is the world.
        """
        self.by_key[slot.key] = slot
        table = self.standbys if slot.session_id is None else self.sessions
        table[slot.id] = max(slot, table.get(slot.id, slot), key=lambda each: each.ranks.page.epoch)

    def remove(self, slot: Slot) -> bool:
        """False if it did not lie here."""
        if self.by_key.pop(slot.key, None) is None:
            return False
        for table in (self.sessions, self.standbys):
            if table.get(slot.id) is slot:
                del table[slot.id]
        return True

    def clear(self) -> None:
        """Nothing lies here any more."""
        for table in (self.by_key, self.sessions, self.standbys):
            table.clear()

    def session(self, session_id: str) -> Slot:
        """The slot of a session; `NotFoundError` if it does not lie here."""
        slot = self.sessions.get(session_id)
        if slot is None:
            raise NotFoundError(f"session {session_id!r} is not on this node", session_id=session_id)
        return slot

    def standby(self, standby_id: str) -> Slot:
        """The slot of a standby; `NotFoundError` if there is none."""
        slot = self.standbys.get(standby_id)
        if slot is None:
            raise NotFoundError(f"no standby {standby_id!r} on this node", standby_id=standby_id)
        return slot
