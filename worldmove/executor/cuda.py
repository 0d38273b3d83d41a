"""A GPU's executor: digests, copies and wipes its memory, in the node's only process with a context there.

`python -m worldmove.executor.cuda --fd N --parent PID --nice N --device UUID`. An error of CUDA's is sticky:
the process says what it was and ends, and the node starts another.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cupy

from worldmove.cuda.driver import find
from worldmove.cuda.memory import Mapping
from worldmove.errors import ConnectionLostError, DeviceError, NoMemoryError, TransportError, ValidationError
from worldmove.executor.gpu import Begun, Gpu
from worldmove.executor.messages import (
    Allocate,
    Attach,
    Copy,
    Detach,
    Digest,
    Done,
    Failed,
    Fill,
    Land,
    Measure,
    Prepare,
    Ready,
    Reply,
    Request,
)
from worldmove.executor.serving import options, prepare, run
from worldmove.ipc import Channel, close_all
from worldmove.memory.near import stay_near

CUDA_ERRORS = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.compiler.CompileException,
)

SPIN_S = 0.003
"""How long after the last thing that got done the loop looks without pause."""
NAP_S = 0.0002
EXPECTANT_S = 0.02
"""How long after it was told to prepare the loop looks without pause: a wake-up takes longer than a start."""


class Due(NamedTuple):
    """An answer that is due when work is done: its call, and what makes the descriptors that go with it."""

    begun: Begun
    call: int
    finish: Callable[[], tuple[int, ...]]


class Desk:
    """Gives the device what is asked for, and answers when it is done. All in one thread: nothing to wake up.

    While something is under way the event loop goes round without pause and looks after it; where nothing has
    got done for a while, it looks less often; where there is nothing to do, it sleeps.
    """

    def __init__(self, gpu: Gpu, channel: Channel[Request]) -> None:
        self._gpu = gpu
        self._channel = channel
        self._copies: deque[Due] = deque()
        self._kernels: deque[Due] = deque()
        self._landings: deque[Due] = deque()
        self._due = asyncio.Event()
        self._expectant = 0.0

    async def receive(self) -> None:
        """Takes requests until the node is gone."""
        await self._channel.send(Ready(os.getpid()))
        while True:
            request, fds = await self._channel.receive()
            try:
                answer = self._take(request, fds)
            except NoMemoryError as error:
                answer = Failed(request.call, error.message, _short_of(error))
            except (ValidationError, TransportError, DeviceError) as error:
                answer = Failed(request.call, error.message)
            except cupy.cuda.memory.OutOfMemoryError as error:
                answer = Failed(request.call, f"the device is out of memory: {error}")
            except (TypeError, ValueError, ArithmeticError) as error:
                answer = Failed(request.call, f"{type(error).__name__}: {error}")
            close_all(fds)
            if answer is not None:
                await self._channel.send(answer)

    def _take(self, request: Request, fds: list[int]) -> Reply | None:
        """Begins a request; the descriptors stay the caller's. Returns the answer, if there is one already.

        Raises:
            ValidationError, TransportError, DeviceError, NoMemoryError: it can't be done, and nothing was.
        """
        match request:
            case Attach(call, key, nbytes, writable, device):
                if len(fds) != 1:
                    raise ValidationError(f"memory {key} needs one descriptor", field="key")
                self._gpu.attach(key, fds[0], nbytes, writable=writable, device=device)
                return Done(call)
            case Detach(call, key):
                self._gpu.detach(key)
                return Done(call)
            case Measure(call):
                return Done(call, sizes=self._gpu.measure())
            case Prepare(call, pieces):
                self._gpu.prepare(pieces)
                self._expectant = time.monotonic() + EXPECTANT_S
                self._due.set()
                return Done(call)
            case Digest(call):
                self._kernels.append(Due(self._gpu.digest(request), call, tuple))
            case Copy(call, pieces):
                self._copies.append(Due(self._gpu.copy(pieces), call, tuple))
            case Land(call):
                self._landings.append(Due(self._gpu.land(request), call, tuple))
            case Fill(call):
                self._kernels.append(Due(self._gpu.fill(request), call, tuple))
            case Allocate(call, nbytes):
                fd, mapping, begun = self._gpu.allocate(nbytes)
                self._kernels.append(Due(begun, call, partial(_allocated, fd, mapping)))
            case _:
                raise ValidationError(f"a GPU knows no {type(request).__name__}", field="request")
        self._due.set()
        return None

    async def answer(self) -> None:
        """Answers what gets done, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            last = time.monotonic()
            streams = (self._copies, self._kernels, self._landings)
            while any(streams) or time.monotonic() < self._expectant:
                if sum([await self._answer_done(due) for due in streams]):
                    last = time.monotonic()
                awake = time.monotonic() < max(last + SPIN_S, self._expectant)
                await asyncio.sleep(0 if awake else NAP_S)

    async def _answer_done(self, due: deque[Due]) -> int:
        """Answers the first ones of a stream as far as they are done; returns how many."""
        count = 0
        while due and due[0].begun.done():
            _, call, finish = due.popleft()
            fds = finish()
            try:
                await self._channel.send(Done(call), fds)
            finally:
                close_all(fds)
            count += 1
        return count


def _allocated(fd: int, mapping: Mapping) -> tuple[int, ...]:
    mapping.close()
    return (fd,)


async def _serve(gpu: Gpu, channel: Channel[Request]) -> None:
    desk = Desk(gpu, channel)
    answering = asyncio.ensure_future(desk.answer())
    receiving = asyncio.ensure_future(desk.receive())
    try:
        await asyncio.wait((answering, receiving), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, receiving):
            if task.done():
                await task
    except ConnectionLostError:
        return
    except (*CUDA_ERRORS, DeviceError) as error:
        # The context may be lost: another process has to go on.
        sys.stderr.write(f"executor {os.getpid()}: {type(error).__name__}: {error}\n")
        os._exit(1)


def _short_of(error: NoMemoryError) -> tuple[int, int]:
    return error.details.get("required_bytes", 0), error.details.get("available_bytes", 0)


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`."""
    parser = options("worldmove.executor.cuda")
    parser.add_argument("--device", required=True)
    given = parser.parse_args(argv)
    prepare(given)
    try:
        stay_near(find(given.device).bus_id)
        gpu = Gpu(given.device)
    except DeviceError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error.message}\n")
        return 1
    return run(given, partial(_serve, gpu))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
