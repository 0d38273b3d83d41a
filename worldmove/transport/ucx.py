"""UCX through UCXX: the one file of this package that imports it, and no more than a shim.

Foreign errors end here: every failure of UCX continues as one of `worldmove.errors`. No request is
ever cancelled, because a cancelled receive goes on writing into its buffer; but UCXX cancels a request
when its Python object is collected, so whoever gets a request keeps it until it has completed.

Nothing of UCX is left to Python's collector either: listeners, endpoints and worker are let go one after the
other, by whoever made them. The collector may run in a forked child before that executes another program:
there UCX's destructors take the parent's descriptors out of the epoll set that both share, and the parent
aborts ("Assertion `status == UCS_OK' failed") when it lets go of the same objects itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

# UCX reads these when its library is loaded, so they can't stand in `OPTIONS`. Loading it patches eight
# functions and busily waits 50 ms after each for other threads to leave them: 0.4 s of CPU at every
# start, where no other thread runs yet. (Switching UCX_MEM_EVENTS off saves the same and makes UCX 1.21
# crash when a peer dies in mid-transfer: its rendezvous then has no registration cache to invalidate.)
os.environ.setdefault("UCX_MEM_BISTRO_GRACE_DURATION", "100us")
os.environ.setdefault("UCX_VFS_ENABLE", "n")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

from ucxx._lib import libucxx
from ucxx._lib.arr import Array
from ucxx.types import Tag, TagMask

from worldmove.errors import ConnectionLostError, TransportError

RENDEZVOUS = 8 * 1024
"""From this length on bytes move only when the receiver has named a buffer."""
OPTIONS = {
    "TLS": "tcp",
    "TCP_TX_SEG_SIZE": "256k",  # the default of 8k halves to quarters the rate
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_CM_REUSEADDR": "y",
    "RNDV_THRESH": str(RENDEZVOUS),
    # The sender writes to the place that the receiver named: the kernel copies straight into the arena.
    # By default bytes pass through UCX's segment buffers, a second copy that costs a third of the core.
    "RNDV_SCHEME": "put_zcopy",
}
DEVICE_OPTIONS = {
    **{name: value for name, value in OPTIONS.items() if name not in ("TLS", "RNDV_SCHEME")},
    "TLS": os.environ.get("UCX_TLS", "tcp,cuda_copy,cuda_ipc"),
}
"""For GPU memory: NVLink by cuda_ipc, or what the operator names (RDMA). UCX falls back to TCP without a
word, so whoever uses these measures."""
_PREFIX = TagMask(0xFFFF_FFFF_FFFF_0000)
_FEATURES = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP, libucxx.Feature.STREAM)


def _lost(error: BaseException) -> ConnectionLostError:
    return ConnectionLostError(f"UCX: {error}" if str(error) else f"UCX: {type(error).__name__}")


def outcome(request: Any) -> ConnectionLostError | None:
    """How a completed request ended."""
    try:
        request.check_error()
    except libucxx.UCXError as error:
        return _lost(error)
    return None


class Probe:
    """A message that was taken out of UCX's queue and not yet received: `tag` (64 bits) and `nbytes`."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.tag = int(found.sender_tag.value)
        self.nbytes = int(found.length)


class Listener:
    """Takes callers at `port` until it is closed, or the worker is."""

    def __init__(self, listening: Any) -> None:
        self._listening = listening
        self.port = int(listening.port)

    def close(self) -> None:
        """Turns away those who have called and were not taken yet; again is allowed."""
        self._listening = None


class Worker:
    """One UCX context with one worker. All calls are made by one thread.

    Args:
        options: of UCX, without the prefix of its environment variables.

    Raises:
        TransportError: UCX can't start.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        try:
            self._context = libucxx.UCXContext(dict(options), _FEATURES)
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except libucxx.UCXError as error:
            raise TransportError(f"UCX cannot start: {error}") from error
        self._listeners: list[Listener] = []

    def close(self) -> None:
        """Ends listeners, worker and context, in this order; endpoints and requests are gone before.

        Nothing else may be called after it.
        """
        for listener in self._listeners:
            listener.close()
        self._worker = None
        self._context = None

    @property
    def descriptor(self) -> int:
        """Becomes readable when an armed worker has something to do."""
        return int(self._worker.epoll_file_descriptor)

    def progress(self, limit: int) -> int:
        """Moves what can be moved, about one segment a step; returns the steps, at most `limit`."""
        once = self._worker.progress_once
        for steps in range(limit):
            if not once():
                return steps
        return limit

    def arm(self) -> bool:
        """Prepares `descriptor`; false if there is something to do already.

        Raises:
            TransportError: the worker is beyond use.
        """
        try:
            return bool(self._worker.arm())
        except libucxx.UCXError as error:
            raise TransportError(f"UCX: {error}") from error

    def listen(self, called: Callable[[Any], None]) -> Listener:
        """Listens on a free port of all IPv4 addresses; `called` gets each caller's endpoint.

        Raises:
            TransportError: it can't.
        """
        if self._worker is None:
            raise TransportError("UCX cannot listen: the worker is closed")
        try:
            made = libucxx.UCXListener.create(
                worker=self._worker, port=0, cb_func=called, deliver_endpoint=True
            )
        except libucxx.UCXError as error:
            raise TransportError(f"UCX cannot listen: {error}") from error
        self._listeners.append(listener := Listener(made))
        return listener

    def connect(self, address: str, port: int) -> Any:
        """An endpoint; whether anyone is there shows later. Raises `ConnectionLostError`."""
        if self._worker is None:
            raise ConnectionLostError(f"UCX cannot connect to {address}:{port}: the worker is closed")
        try:
            return libucxx.UCXEndpoint.create(self._worker, address, port, True)
        except libucxx.UCXError as error:
            raise ConnectionLostError(f"UCX cannot connect to {address}:{port}: {error}") from error

    def probe(self, prefix: int) -> Probe | None:
        """The next message whose tag begins with these 48 bits, in order of arrival."""
        found = self._worker.tag_probe(Tag(prefix << 16), _PREFIX, True)
        return Probe(found) if found.matched else None

    def receive(self, probe: Probe, buffer: Any) -> Any:
        """Request that receives a probed message; once only, into a buffer of its length."""
        return _post(lambda: self._worker.tag_recv_with_handle(Array(buffer), probe.found))


def send(endpoint: Any, tag: int, buffer: Any) -> Any:
    """Request that sends a tagged message."""
    return _post(lambda: endpoint.tag_send(Array(buffer), Tag(tag)))


def stream_send(endpoint: Any, buffer: Any) -> Any:
    """Request that sends bytes on the endpoint's own stream."""
    return _post(lambda: endpoint.stream_send(Array(buffer)))


def stream_receive(endpoint: Any, buffer: Any) -> Any:
    """Request that fills a buffer from the endpoint's own stream."""
    return _post(lambda: endpoint.stream_recv(Array(buffer)))


def close(endpoint: Any) -> Any | None:
    """Request that closes an endpoint at once, or `None` where UCXX has closed it after a failure.

    (For a failed endpoint UCXX would return a null request, and to ask it anything is a crash.)
    """
    return _post(endpoint.close) if endpoint.alive else None


def _post(post: Callable[[], Any]) -> Any:
    try:
        return post()
    except libucxx.UCXError as error:
        raise _lost(error) from error
