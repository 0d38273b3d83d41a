"""What was generated of one world, block by block, whoever did it, beside the twin."""

from __future__ import annotations

from worldmove.soak.world import twin


class Story:
    """The blocks of one session.

    They come from several stacks, each in its order, and are put into one.

    Attributes:
        torn: blocks that differ from the twin's. twice: blocks that came more than once.
        block: all blocks up to this one have come.
    """

    def __init__(self, state_mb: int) -> None:
        self.torn: list[int] = []
        self.twice: list[int] = []
        self._twin = twin(state_mb)
        self._early: dict[int, str] = {}

    @property
    def block(self) -> int:
        """All blocks up to this one have come, and were compared."""
        return self._twin.block

    @property
    def gap(self) -> bool:
        """Whether a block has come and the one before has not."""
        return bool(self._early)

    def add(self, block: int, digest: str) -> None:
        """A stack has generated a block."""
        if block <= self.block or block in self._early:
            self.twice.append(block)
            return
        self._early[block] = digest
        while (found := self._early.pop(self.block + 1, None)) is not None:
            self._twin.step()
            if self._twin.digest() != found:
                self.torn.append(self.block)
