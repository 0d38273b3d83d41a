"""Ctrl-C and SIGTERM while a command loads, and afterwards. Imports nothing that is slow to load."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """While inside, a signal ends the process without a word: nothing has begun that would have to be undone.

    For imports: an exception in the middle of one is shown as a traceback, wherever it is caught. They
    leave no garbage worth the time that is spent on looking for it meanwhile, a tenth of a node's start.
    """
    collecting = gc.isenabled()
    gc.disable()
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    for number in SIGNALS:
        handle(number, _leave)
    try:
        yield
    finally:
        # The other way round: SIGTERM's handler may ask for SIGINT's, and must not find the one from above.
        for number, handler in reversed(before):
            handle(number, handler)
        if collecting:
            gc.enable()


def handle(number: int, handler: signal._HANDLER) -> None:
    """As `signal.signal`; what is ignored, as Ctrl-C in a background job, stays so."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
