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
from worldmove.cuda.memory import Window
from worldmove.errors import ConnectionLostError, DeviceError, NoMemoryError, TransportError, ValidationError
from worldmove.executor.faults import LAND_FLIP_ONCE
from worldmove.executor.gpu import Gpu
from worldmove.executor.messages import (
    Allocate,
    Armed,
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
    Reach,
    Ready,
    Release,
    Reply,
    Request,
    Shift,
)
from worldmove.executor.serving import options, prepare, run
from worldmove.executor.signs import Waiting
from worldmove.ipc import Channel, close_all
from worldmove.kernels.streams import Begun
from worldmove.memory.near import stay_near

CUDA_ERRORS = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.compiler.CompileException,
)

SPIN_S = 0.003
"""How long after the last thing that got done the loop looks without pause."""
NAP_S = 0.0001
EXPECTANT_S = 0.03
"""How long after it was told to prepare the loop looks without pause: a wake-up takes longer than a start."""


class Due(NamedTuple):
    """An answer that is due when work is done.

    Attributes:
        finish: makes the descriptors that go with it. sizes: of the answer.
    """

    begun: Begun
    call: int
    finish: Callable[[], tuple[int, ...]]
    sizes: tuple[int, ...] = ()


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
        self._waiting = Waiting()
        self._answers: deque[Reply] = deque()
        self._due = asyncio.Event()
        self._expectant = 0.0

    async def receive(self) -> None:
        """Takes requests until the node is gone."""
        await self._channel.send(Ready(os.getpid()))
        while True:
            request, fds = await self._channel.receive()
            answer = self._attempt(request.call, partial(self._take, request, fds))
            close_all(fds)
            if answer is not None:
                await self._channel.send(answer)

    def _attempt(self, call: int, work: Callable[[], Reply | None]) -> Reply | None:
        """Does it; the answer, if there is one already: what was wrong, too.

        Raises:
            DeviceError: the context is lost.
        """
        try:
            return work()
        except NoMemoryError as error:
            return Failed(call, error.message, error.details)
        except DeviceError as error:
            self._gpu.check()
            return Failed(call, error.message)
        except (ValidationError, TransportError) as error:
            return Failed(call, error.message)
        except cupy.cuda.memory.OutOfMemoryError as error:
            return Failed(call, f"the device is out of memory: {error}")
        except (TypeError, ValueError, ArithmeticError) as error:
            return Failed(call, f"{type(error).__name__}: {error}")

    def _take(self, request: Request, fds: list[int]) -> Reply | None:
        """Begins a request; the descriptors stay the caller's. Returns the answer, if there is one already.

        Raises:
            ValidationError, TransportError, DeviceError, NoMemoryError: it can't be done, and nothing was.
        """
        match request:
            case Attach() | Detach() | Measure() | Reach() | Prepare():
                return self._take_at_once(request, fds)
            case Armed():
                self._waiting.arm(request)
                self._expect()
            case Release():
                self._release(request)
            case Digest() | Land():
                self._begin(request, ())
            case Copy(call, pieces):
                self._copies.append(Due(self._gpu.copy(pieces), call, tuple))
            case Shift(call):
                self._copies.append(Due(self._gpu.shift(request), call, tuple))
            case Fill(call):
                self._kernels.append(Due(self._gpu.fill(request), call, tuple))
            case Allocate(call, nbytes):
                fd, mapping, begun = self._gpu.allocate(nbytes)
                self._kernels.append(Due(begun, call, partial(_allocated, fd, mapping)))
            case _:
                raise ValidationError(f"a GPU knows no {type(request).__name__}", field="request")
        self._due.set()
        return None

    def _take_at_once(self, request: Attach | Detach | Measure | Reach | Prepare, fds: list[int]) -> Reply:
        match request:
            case Attach(call, key, nbytes, writable, device, watched):
                if len(fds) != 1:
                    raise ValidationError(f"memory {key} needs one descriptor", field="key")
                if watched:
                    self._waiting.watch(key, fds[0], nbytes)
                else:
                    self._gpu.attach(key, fds[0], nbytes, writable=writable, device=device)
            case Detach(call, key):
                if not self._waiting.forget(key):
                    self._gpu.detach(key)
            case Measure(call):
                return Done(call, sizes=self._gpu.measure())
            case Reach(call, devices):
                return Done(call, sizes=self._gpu.reach(devices))
            case Prepare(call, pieces):
                self._gpu.prepare(pieces)
                self._expect()
        return Done(request.call)

    def _release(self, request: Release) -> None:
        for armed in self._waiting.take(request.key):
            if request.begin:
                self._begin_armed(armed, ())
            else:
                self._answers.append(_not_begun(armed))
        self._answers.append(Done(request.call))

    def _expect(self) -> None:
        self._expectant = time.monotonic() + EXPECTANT_S
        self._due.set()

    def _begin(self, work: Digest | Land, sizes: tuple[int, ...]) -> None:
        if isinstance(work, Digest):
            self._kernels.append(Due(self._gpu.digest(work), work.call, tuple, sizes))
        else:
            self._landings.append(Due(self._gpu.land(work), work.call, tuple, sizes))

    def _begin_armed(self, armed: Armed, sizes: tuple[int, ...]) -> None:
        failed = self._attempt(armed.call, partial(self._begin, armed.work, sizes))
        self._answers += [failed] if failed is not None else []

    def _look(self) -> None:
        """Begins what is armed where its world stands, and gives up what has waited for too long."""
        for armed, sizes in self._waiting.due():
            self._begin_armed(armed, sizes)
        self._answers += [_not_begun(armed) for armed in self._waiting.late()]

    async def answer(self) -> None:
        """Answers what gets done, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            last = time.monotonic()
            streams = (self._copies, self._kernels, self._landings)
            while any(streams) or self._waiting or self._answers or time.monotonic() < self._expectant:
                if self._waiting:
                    self._look()
                while self._answers:
                    await self._channel.send(self._answers.popleft())
                if sum([await self._answer_done(due) for due in streams]):
                    last = time.monotonic()
                if time.monotonic() >= max(last + SPIN_S, self._expectant):
                    # The loop's own timers count whole milliseconds; nobody else runs in it.
                    time.sleep(NAP_S)  # noqa: ASYNC251
                await asyncio.sleep(0)

    async def _answer_done(self, due: deque[Due]) -> int:
        """Answers the first ones of a stream as far as they are done; returns how many."""
        count = 0
        while due and due[0].begun.done():
            _, call, finish, sizes = due.popleft()
            fds = finish()
            try:
                await self._channel.send(Done(call, sizes=sizes), fds)
            finally:
                close_all(fds)
            count += 1
        return count


def _allocated(fd: int, mapping: Window) -> tuple[int, ...]:
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


def _not_begun(armed: Armed) -> Failed:
    return Failed(armed.call, "it was armed, and has not begun")


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`."""
    parser = options("worldmove.executor.cuda")
    parser.add_argument("--device", required=True)
    parser.add_argument("--faults", default="")
    given = parser.parse_args(argv)
    prepare(given)
    try:
        stay_near(find(given.device).bus_id)
        gpu = Gpu(given.device, spoil=LAND_FLIP_ONCE in given.faults.split(","))
    except DeviceError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error.message}\n")
        return 1
    return run(given, partial(_serve, gpu))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
