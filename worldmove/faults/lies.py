"""Lies that a node can be made to tell its peer: each alters one field of a true message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from worldmove import messages as m
from worldmove.machine import Role
from worldmove.manifest import DIGEST_BYTES
from worldmove.protocol import State

Alter = Callable[[Any], m.Message]
replace = msgspec.structs.replace


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 0xFF]) if data else b"\x5a"


def _other_root(message: m.Sealed | m.Verified) -> m.Message:
    return replace(message, root=_flip(bytes.fromhex(message.root)).hex())


def _other_digest(part: m.TablePart) -> m.Message:
    if part.shown:  # the table itself is what it is: others are told instead of it
        return replace(part, shown=0, digests=bytes(DIGEST_BYTES * min(part.shown, m.MAX_PART_LEAVES)))
    return replace(part, digests=_flip(part.digests[:DIGEST_BYTES]) + part.digests[DIGEST_BYTES:])


def _other_begin(begin: m.Begin) -> m.Message:
    if begin.extent_bytes:
        return replace(begin, extent_bytes=(begin.extent_bytes[0] // 2, *begin.extent_bytes[1:]))
    return replace(begin, lanes=())


def _other_token(begin: m.Begin) -> m.Message:
    if begin.token is not None:
        return replace(begin, token=_flip(begin.token))
    if begin.direct:
        # Those of the lanes that are offered beside them stay right: what takes their place can be seen.
        return replace(begin, direct=tuple(replace(lane, token=_flip(lane.token)) for lane in begin.direct))
    return replace(begin, lanes=tuple(replace(lane, token=_flip(lane.token)) for lane in begin.lanes))


def _other_length(part: m.TablePart) -> m.Message:
    return replace(part, first=part.first + m.MAX_LEAVES // 2)


def _other_manifest(hello: m.Hello) -> m.Message:
    """The manifest's first region is shorter than the standby's."""
    first, *others = hello.manifest.regions
    rows, *axes = first.shape or (1,)
    shorter = replace(first, shape=(max(rows // 2, 1), *axes))
    return replace(hello, manifest=replace(hello.manifest, regions=(shorter, *others)))


LIES: dict[str, dict[type[m.Message], Alter]] = {
    "lie-digest": {m.TablePart: _other_digest},
    "lie-root": {m.Sealed: _other_root, m.Verified: _other_root},
    "lie-length": {
        m.Hello: _other_manifest,
        m.Begin: _other_begin,
        m.TablePart: _other_length,
        m.Landed: lambda landed: replace(landed, bytes=landed.bytes // 2 + 1),
    },
    "lie-epoch": {
        m.Hello: lambda hello: replace(hello, epoch=hello.epoch + 1),
        m.Committed: lambda committed: replace(committed, epoch=committed.epoch + 7),
        m.Adopted: lambda adopted: replace(adopted, epoch=adopted.epoch + 7),
    },
    "lie-session": {m.Hello: lambda hello: replace(hello, session_id=f"{hello.session_id}-other")},
    "lie-round": {
        kind: lambda message: replace(message, number=message.number + 1)
        for kind in (m.Round, m.TablePart, m.TableEnd, m.Landed)
    },
    "lie-state": {
        m.Sealed: lambda sealed: replace(
            sealed, host_states=(_flip(sealed.host_states[0]), *sealed.host_states[1:])
        )
    },
    "lie-token": {m.Begin: _other_token},
}
"""By the lie's name: which messages it can be told in, and how."""

SENT: dict[Role, dict[State, tuple[type[m.Message], ...]]] = {
    "source": {
        State.REQUESTED: (m.Hello,),
        State.ADMITTED: (m.Begin,),
        State.COPYING: (m.Round, m.TablePart, m.TableEnd),
        State.FINISHING: (m.Round, m.TablePart, m.TableEnd),
        State.VERIFYING: (m.Sealed,),
        State.SETTLING: (m.Abort,),
        State.RELEASED: (m.Released,),
    },
    "destination": {
        State.ADMITTED: (m.Admitted,),
        State.PREPARED: (m.Prepared,),
        State.COPYING: (m.Landed,),
        State.VERIFYING: (m.Verified,),
        State.COMMITTED: (m.Committed,),
        State.ADOPTED: (m.Adopted,),
        State.SETTLING: (m.Abort,),
    },
}
"""What each side sends in each phase."""
