"""A GPU's executor: digests, copies and wipes its memory, in the node's only process with a context there.

`python -m worldmove.executor.cuda --fd N --parent PID --nice N --device UUID`. One thread gives the device
work in the order of the requests; one thread for each stream waits for what was begun, and answers. An error
of CUDA's is sticky: the process says what it was and ends, and the node starts another.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn

import cupy

from worldmove.cuda.memory import Mapping
from worldmove.errors import DeviceError, NoMemoryError, TransportError, ValidationError
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
    Measure,
    Reply,
    Request,
)
from worldmove.executor.serving import Answer, Tasks, options, prepare, run
from worldmove.ipc import close_all

CUDA_ERRORS = (
    cupy.cuda.runtime.CUDARuntimeError,
    cupy.cuda.driver.CUDADriverError,
    cupy.cuda.compiler.CompileException,
)


class Due(NamedTuple):
    """An answer that is due when work is done."""

    begun: Begun
    finish: Callable[[], object]


class Desk:
    """Gives the device what is asked for, and answers when it is done."""

    def __init__(self, gpu: Gpu, answer: Answer) -> None:
        self._gpu = gpu
        self._answer = answer
        self._copies: queue.SimpleQueue[Due] = queue.SimpleQueue()
        self._kernels: queue.SimpleQueue[Due] = queue.SimpleQueue()
        for name, due in (("copies", self._copies), ("kernels", self._kernels)):
            threading.Thread(target=self._await, args=(due,), name=name, daemon=True).start()

    def take(self, request: Request, fds: list[int]) -> None:
        """Begins a request; the descriptors stay the caller's.

        Raises:
            ValidationError, TransportError, DeviceError, NoMemoryError: it can't be done, and nothing was.
        """
        done = partial(self._answer, Done(request.call), ())
        match request:
            case Attach(_, key, nbytes, writable, device):
                if len(fds) != 1:
                    raise ValidationError(f"memory {key} needs one descriptor", field="key")
                self._gpu.attach(key, fds[0], nbytes, writable=writable, device=device)
                done()
            case Detach(_, key):
                self._gpu.detach(key)
                done()
            case Digest():
                self._kernels.put(Due(self._gpu.digest(request), done))
            case Copy(_, pieces):
                self._copies.put(Due(self._gpu.copy(pieces), done))
            case Fill():
                self._kernels.put(Due(self._gpu.fill(request), done))
            case Allocate(call, nbytes):
                fd, mapping, begun = self._gpu.allocate(nbytes)
                self._kernels.put(Due(begun, partial(self._allocated, call, fd, mapping)))
            case Measure(call):
                self._answer(Done(call, sizes=self._gpu.measure()), ())
            case _:
                raise ValidationError(f"a GPU knows no {type(request).__name__}", field="request")

    def _allocated(self, call: int, fd: int, mapping: Mapping) -> None:
        mapping.close()
        self._answer(Done(call), (fd,))

    def _await(self, due: queue.SimpleQueue[Due]) -> None:
        self._gpu.use()
        while True:
            begun, finish = due.get()
            try:
                begun.event.synchronize()
                finish()
            except (*CUDA_ERRORS, DeviceError) as error:
                _end(error)


def _work(gpu: Gpu, tasks: Tasks, answer: Answer) -> None:
    gpu.use()
    desk = Desk(gpu, answer)
    while True:
        request, fds = tasks.get()
        failed: Reply | None = None
        try:
            desk.take(request, fds)
        except NoMemoryError as error:
            failed = Failed(request.call, error.message, _short_of(error))
        except (ValidationError, TransportError, DeviceError) as error:
            failed = Failed(request.call, error.message)
        except cupy.cuda.memory.OutOfMemoryError as error:
            failed = Failed(request.call, f"the device is out of memory: {error}")
        except (TypeError, ValueError, ArithmeticError) as error:
            failed = Failed(request.call, f"{type(error).__name__}: {error}")
        except CUDA_ERRORS as error:
            _end(error)
        close_all(fds)
        if failed is not None:
            answer(failed, ())


def _short_of(error: NoMemoryError) -> tuple[int, int]:
    return error.details.get("required_bytes", 0), error.details.get("available_bytes", 0)


def _end(error: BaseException) -> NoReturn:
    """The context may be lost: another process has to go on."""
    sys.stderr.write(f"executor {os.getpid()}: {type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(1)


def main(argv: list[str]) -> int:
    """Runs the executor on the inherited socket `--fd`."""
    parser = options("worldmove.executor.cuda")
    parser.add_argument("--device", required=True)
    given = parser.parse_args(argv)
    prepare(given)
    try:
        gpu = Gpu(given.device)
    except DeviceError as error:
        sys.stderr.write(f"executor {os.getpid()}: {error.message}\n")
        return 1
    return run(given, partial(_work, gpu))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
