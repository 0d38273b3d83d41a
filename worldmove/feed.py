"""Numbered news for any number of readers, with a bounded memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 256


class Feed(Generic[T]):
    """Keeps the latest items by number; a reader that lags further behind continues with the oldest kept."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, T]] = deque(maxlen=REMEMBERED)
        self._last = 0
        self._closed = False
        self._news = asyncio.Event()

    @property
    def last(self) -> int:
        """Number of the latest item; 0 before the first."""
        return self._last

    def publish(self, item: T) -> None:
        """Adds an item with the next number."""
        self._last += 1
        self._items.append((self._last, item))
        self._wake()

    def open(self) -> None:
        """Items come again, with the next numbers."""
        self._closed = False

    def close(self) -> None:
        """No more items will come: readers end after the last one."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int = 0) -> AsyncIterator[tuple[int, T]]:
        """Items with their numbers, from the first later than `after` on."""
        while True:
            news = self._news
            for number, item in list(self._items):
                if number > after:
                    after = number
                    yield number, item
            if self._closed and after >= self._last:
                return
            if news is self._news:
                await news.wait()
