"""The way in: signals are seen to before anything else, since loading the commands takes a while.

Imports nothing that is slow to load.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from worldmove.cli.signals import SIGNALS, at_once, handle

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """Runs the command line and exits with its code; 130 after Ctrl-C, 143 after SIGTERM.

    SIGTERM ends a command as Ctrl-C does: everything that it has started is ended first.
    """
    came: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # Whoever handles Ctrl-C now, as an event loop does, ends what there is to end.
        as_interrupt = signal.getsignal(signal.SIGINT)
        if callable(as_interrupt):
            as_interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    code: object = INTERRUPTED
    try:
        # First of all, and in here: there is no moment in which a signal would end it in another way.
        handle(signal.SIGTERM, terminate)
        with at_once():
            from worldmove.cli.commands import app  # noqa: PLC0415 - takes half a second
        app()
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # While the interpreter ends there is nothing left to do but to go.
        for number in SIGNALS:
            handle(number, signal.SIG_DFL)
        # An interrupt that came through code made of text, as named tuples are, counts as unhandled for the
        # interpreter, which would kill itself at its end; the next such code takes that back.
        exec("")  # noqa: S102
    sys.exit(TERMINATED if came and code == INTERRUPTED else code)  # type: ignore[arg-type]
