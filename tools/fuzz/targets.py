"""What is fuzzed: every decoder of bytes that another process or another node sent.

Each target takes any bytes and returns; an exception is a finding. A decoder may refuse with a
`FramingError` and nothing else, and what it accepts must satisfy what later code takes for granted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from worldmove import ipc, messages
from worldmove.errors import FramingError, ManifestError
from worldmove.manifest import DIGEST_BYTES, LeafMap, layout, validate
from worldmove.page.messages import NodeMessage, WorkerMessage
from worldmove.transport import framing
from worldmove.transport.framing import Kind
from worldmove.transport.table import LaneRegion, RegionTable

Target = Callable[[bytes], None]
TOKEN, MOVE = b"t" * 32, "move-1"
REGIONS = (4096, 0, 1, 300_000)


def peer(data: bytes) -> None:
    """A message of another node."""
    try:
        message = messages.decode(data)
    except FramingError:
        return
    again = messages.decode(messages.encode(message))
    if repr(again) != repr(message):
        raise AssertionError("a message is another one after encoding it again")
    if isinstance(message, messages.TablePart) and len(message.digests) % DIGEST_BYTES:
        raise AssertionError("a part of a digest was let in")
    if isinstance(message, messages.Hello):
        _manifest(message)


def _manifest(hello: messages.Hello) -> None:
    try:
        validate(hello.manifest)
    except ManifestError:
        return
    extents, places = layout(hello.manifest.regions)
    for region, place in zip(hello.manifest.regions, places, strict=True):
        if place.offset + region.nbytes > extents[place.extent].nbytes:
            raise AssertionError("a region leaves its extent")
    if LeafMap(hello.manifest.regions).count < 0:
        raise AssertionError("a manifest has fewer than no leaves")


def packets(data: bytes) -> None:
    """A packet of a worker and one of a node, with a descriptor that may be anything."""
    choice, body = data[:1], data[1:]
    for kind in (WorkerMessage, NodeMessage):
        _packet(body, kind, choice[0] if choice else 0)


def _packet(packet: bytes, kind: Any, choice: int) -> None:
    mine, theirs = ipc.socketpair()
    fds = _descriptors(choice)
    channel: ipc.SyncChannel[Any] = ipc.SyncChannel(theirs, kind)
    try:
        try:
            socket.send_fds(mine, [packet[: ipc.MAX_PACKET * 2]], fds)
        except OSError:
            return
        mine.close()
        try:
            _, got = channel.receive(timeout=5) or (None, [])
        except (FramingError, ipc.ConnectionLostError):
            return
        ipc.close_all(got)
    finally:
        ipc.close_all(fds)
        mine.close()
        channel.close()


def _descriptors(choice: int) -> list[int]:
    """None, an end of a pipe, a directory, or a memory file of up to 63 bytes."""
    if choice < 64:
        return []
    if choice < 96:
        reader, writer = os.pipe()
        os.close(writer if choice % 2 else reader)
        return [reader if choice % 2 else writer]
    if choice < 112:
        return [os.open("/", os.O_RDONLY)]
    fd = os.memfd_create("fuzz")
    os.write(fd, b"\x81\xa4type\xa5ready"[: choice % 64])
    return [fd]


def bodies(data: bytes) -> None:
    """The body of a packet between worker and node, without a socket."""
    for kind in (WorkerMessage, NodeMessage):
        header = ipc.HEADER.pack(ipc.MAGIC, 0, len(data))
        try:
            message, fds = ipc.unpack(header + data, [], 0, msgspec.msgpack.Decoder(kind))
        except FramingError:
            continue
        if fds or not isinstance(message, kind):
            raise AssertionError("a packet became something else")


def lane(data: bytes) -> None:
    """A message on a lane: its tag, then its body; pulls are checked against a table and planned."""
    tag, sequence, body = int.from_bytes(data[:2], "little"), int.from_bytes(data[2:4], "little"), data[4:]
    try:
        kind = framing.read_tag(tag, len(body), sequence)
        if kind in (Kind.HELLO, Kind.WELCOME):
            framing.check_opening(body, kind, TOKEN, MOVE)
        elif kind is Kind.PULL:
            _pull(body)
    except FramingError:
        return


def _pull(body: bytes) -> None:
    spans = framing.unpack_spans(body)
    volume = framing.check_volume(spans)
    table, place = [], 0
    for nbytes in REGIONS:
        table.append(LaneRegion(0, place, nbytes))
        place += nbytes
    regions = RegionTable([memoryview(bytearray(place))], table)
    regions.check(spans)
    planned = 0
    for chunk in framing.plan(spans):
        if not 0 < chunk.nbytes <= framing.CHUNK or chunk.nbytes != sum(p.length for p in chunk.pieces):
            raise AssertionError("a chunk has another length than its pieces, or than is allowed")
        if sum(regions.view(piece).nbytes for piece in chunk.pieces) != chunk.nbytes:
            raise AssertionError("a piece leaves its region")
        planned += chunk.nbytes
    if planned != volume:
        raise AssertionError("a plan has another volume than its pull")


TARGETS: dict[str, Target] = {"peer": peer, "packets": packets, "bodies": bodies, "lane": lane}
