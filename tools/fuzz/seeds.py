"""Where fuzzing begins: one good input for each kind of message, and hypothesis's way of spoiling them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import strategies as st
from targets import MOVE, TOKEN

from worldmove import ipc, messages
from worldmove.manifest import Manifest, Place, Region
from worldmove.page import messages as page
from worldmove.transport import framing
from worldmove.transport.framing import Kind

MANIFEST = Manifest("m", (Region("k", "float32", (4, 8)), Region("e", "u1", (0,))), 750.0, 250.0)


def _peer() -> list[bytes]:
    offers = (messages.LaneOffer("127.0.0.1", 7, TOKEN),)
    given = [
        messages.Hello(
            move_id=MOVE,
            session_id="w",
            source="A",
            source_incarnation=1,
            boot_id="b",
            epoch=1,
            seed=2**64 - 1,
            manifest=MANIFEST,
            fingerprint={"cpu": "x"},
            live=True,
            path="auto",
            socket="/s",
            horizon_ms=250.0,
            deadline_ms=1000.0,
        ),
        messages.Admitted(incarnation=1, path="staged", lanes=1, available={"bytes": 1.0}),
        messages.Rejected(code="no-memory", message="no", details={"required_bytes": 5, "fields": ["a"]}),
        messages.Begin(lanes=offers, extent_bytes=(512,), places=(Place(0, 0),)),
        messages.TablePart(number=1, first=0, digests=b"d" * 32),
        messages.Sealed(block=3, host_states=(b"state",), root="ab" * 32),
        messages.Verified(root="ab" * 32, leaves=1, bytes=1, kept_bytes=0, ms=1.0),
        messages.Abort(code="deadline", message="late"),
    ]
    return [messages.encode(message) for message in given]


def _bodies() -> list[bytes]:
    given = [
        page.Hello("a.b"),
        page.Rejoin("s", 0, "secret", 3, stopped=True, waiting=False),
        page.Ready(),
        page.Paused(3),
        page.Revise(1, ("k",), (page.Put(MANIFEST.regions[0], 0, 0),), (512,)),
        page.Welcome("s", "w", 0, 1, 1, MANIFEST, (Place(0, 0),), (0,), (512,), "secret", 0),
        page.Memory(1),
        page.Refused("unauthorized", "no"),
        page.Adopted("w", 2, 3, None),
    ]
    return [msgspec.msgpack.encode(message) for message in given]


def _packets() -> list[bytes]:
    plain = [b"\0" + ipc.HEADER.pack(ipc.MAGIC, 0, len(body)) + body for body in _bodies()]
    spilled = [
        bytes([choice]) + ipc.HEADER.pack(ipc.MAGIC, ipc.SPILLED, 0) for choice in (0, 64, 65, 96, 128)
    ]
    return plain + spilled


def _lane() -> list[bytes]:
    table = b"d" * 16
    pull = framing.pack_spans([(0, 0, 4096), (3, 0, 300_000), (2, 0, 1)])  # type: ignore[list-item]
    given = [
        (Kind.HELLO, framing.opening(Kind.HELLO, TOKEN, MOVE, table)),
        (Kind.WELCOME, framing.opening(Kind.WELCOME, TOKEN, MOVE, table)),
        (Kind.PULL, np.asarray(pull).tobytes()),
        (Kind.BEAT, b""),
        (Kind.ERROR, b"why"),
    ]
    return [framing.tag_of(kind, 1).to_bytes(2, "little") + b"\1\0" + body for kind, body in given]


MAKERS = {"peer": _peer, "bodies": _bodies, "packets": _packets, "lane": _lane}


@cache
def seeds(name: str) -> tuple[bytes, ...]:
    """Good inputs of a target."""
    return tuple(MAKERS[name]())


def write(name: str, folder: Path) -> None:
    """Puts the seeds into the folder in which a fuzzer keeps its inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (folder / f"seed-{number}").write_bytes(seed)


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Bytes of any kind, and good inputs with some bytes replaced, cut off or put in."""

    def spoil(seed: bytes, where: float, gone: int, put: bytes) -> bytes:
        at = int(where * len(seed))
        return seed[:at] + put + seed[at + gone :]

    spoiled = st.builds(
        spoil, st.sampled_from(seeds(name)), st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)
    )
    twice = st.builds(spoil, spoiled, st.floats(0, 1), st.integers(0, 4), st.binary(max_size=4))
    return st.binary(max_size=300) | spoiled | twice
