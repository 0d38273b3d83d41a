"""The film as it was shown: every block, the node that made it, and whether it equals the twin's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from worldmove.demo.frames import BLOCK_FRAMES, FRAME_BYTES, HEIGHT, WIDTH, Pixels
from worldmove.errors import ValidationError

BLOCK_BYTES = BLOCK_FRAMES * FRAME_BYTES


class Film:
    """Blocks of pictures in an unnamed file, by number from 1; a context manager that forgets them.

    Attributes:
        nodes: by block number, the node that generated it.
        twice: blocks that came more than once.
        states: by block, the digest of the state that arrived after it on another node.
        twins: by block, the digest of the twin's state.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.nodes: dict[int, str] = {}
        self.twice: list[int] = []
        self.states: dict[int, str] = {}
        self.twins: dict[int, str] = {}
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 - closed by __exit__
            prefix="wm-film-", dir=folder
        )
        self._equal: dict[int, list[bool]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def last(self) -> int:
        """The highest block number; 0 for an empty film."""
        return max(self.nodes, default=0)

    @property
    def missing(self) -> list[int]:
        """Blocks below the last that never came."""
        return [block for block in range(1, self.last + 1) if block not in self.nodes]

    @property
    def frames(self) -> int:
        """Number of pictures."""
        return len(self.nodes) * BLOCK_FRAMES

    def add(self, block: int, node: str, pictures: bytes) -> None:
        """Adds a block; the first of two with one number stays.

        Raises:
            ValidationError: the block has no number or a wrong size.
        """
        if block < 1 or len(pictures) != BLOCK_BYTES:
            raise ValidationError(
                f"block {block} has {len(pictures)} bytes; {BLOCK_BYTES} and a number from 1 are allowed",
                field="pictures",
            )
        if block in self.nodes:
            self.twice.append(block)
            return
        self.nodes[block] = node
        self._file.seek((block - 1) * BLOCK_BYTES)
        self._file.write(pictures)

    def picture(self, frame: int) -> Pixels:
        """The picture with this number, counted from 1."""
        self._file.seek((frame - 1) * FRAME_BYTES)
        return np.frombuffer(self._file.read(FRAME_BYTES), dtype=np.uint8).reshape(HEIGHT, WIDTH, 3)

    def compare(self, block: int, pictures: bytes) -> None:
        """Compares a block of the twin's with what was shown, picture by picture."""
        self._file.seek((block - 1) * BLOCK_BYTES)
        mine = self._file.read(BLOCK_BYTES)
        self._equal[block] = [
            mine[at : at + FRAME_BYTES] == pictures[at : at + FRAME_BYTES]
            for at in range(0, BLOCK_BYTES, FRAME_BYTES)
        ]

    def equal(self, frame: int) -> bool:
        """Whether the picture was compared and found equal."""
        block, index = divmod(frame - 1, BLOCK_FRAMES)
        return self._equal.get(block + 1, [False] * BLOCK_FRAMES)[index]

    @property
    def compared(self) -> int:
        """Number of pictures that were compared."""
        return len(self._equal) * BLOCK_FRAMES

    @property
    def equals(self) -> int:
        """Number of pictures that are bit for bit the twin's."""
        return sum(sum(marks) for marks in self._equal.values())

    @property
    def states_equal(self) -> int:
        """Number of arrived states that are bit for bit the twin's after the same block."""
        return sum(self.twins.get(block) == state for block, state in self.states.items())

    def stays(self) -> list[tuple[str, int, int]]:
        """Runs of blocks on one node: (node, first frame, last frame), in order."""
        runs: list[tuple[str, int, int]] = []
        for block in sorted(self.nodes):
            node = self.nodes[block]
            first, last = (block - 1) * BLOCK_FRAMES + 1, block * BLOCK_FRAMES
            if runs and runs[-1][0] == node:
                runs[-1] = (node, runs[-1][1], last)
            else:
                runs.append((node, first, last))
        return runs
