"""What the soak's serving stacks tell their parent, over a packet socket (`worldmove.ipc`)."""

from __future__ import annotations

import msgspec


class News(msgspec.Struct, frozen=True, tag=True):
    """Base of all news."""


class Waiting(News, frozen=True, tag="waiting"):
    """A standby waits."""


class Playing(News, frozen=True, tag="playing"):
    """The stack has a world, and generates from `block` + 1 on."""

    session: str
    block: int
    epoch: int


class Generated(News, frozen=True, tag="generated"):
    """One block was generated; `digest` is of every byte of the world after it."""

    session: str
    block: int
    digest: str


class Left(News, frozen=True, tag="left"):
    """The world is not this stack's any more; `reason` says where it went, or why it ended."""

    session: str
    block: int
    reason: str


class Failed(News, frozen=True, tag="failed"):
    """The stack gives up."""

    code: str
    reason: str


AnyNews = Waiting | Playing | Generated | Left | Failed
"""Union of all news, for decoding."""
