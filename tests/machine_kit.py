"""For tests of the move's machine: an example of every event, and what is remembered in every state."""

from __future__ import annotations

from typing import Any, get_args

from worldmove import messages as m
from worldmove import protocol as p
from worldmove.machine import Machine, Role
from worldmove.manifest import Manifest, Region
from worldmove.protocol import State
from worldmove.rounds import RoundPolicy, Taken
from worldmove.rules.common import Facts, replace

EPOCH = 3
ROOT = "ab" * 32
OTHER_ROOT = "cd" * 32
POLICY = RoundPolicy(max_rounds=4, max_repairs=2, small_bytes=1000, horizon_ms=1_000.0, block_ms=50.0)

MANIFEST = Manifest(model="toy", regions=(Region("k", "uint8", (1 << 20,)),), block_ms=50.0, horizon_ms=100.0)
HELLO = m.Hello(
    move_id="move-1",
    session_id="world",
    source="a",
    source_incarnation=1,
    boot_id="boot",
    epoch=EPOCH,
    seed=7,
    manifest=MANIFEST,
    fingerprint={},
    live=True,
    path="auto",
    horizon_ms=100.0,
    deadline_ms=1000.0,
)
BEGIN = m.Begin(lanes=(m.LaneOffer("127.0.0.1", 4001, bytes(32)),))
SEALED = m.Sealed(block=12, host_states=(b"state",), root=ROOT)
VERIFIED = m.Verified(root=ROOT, leaves=2, bytes=2000, kept_bytes=9000, ms=4.0)
COMMITTED = m.Committed(epoch=EPOCH + 1, commit_ms=1.0)
ADOPTED = m.Adopted(epoch=EPOCH + 1, resume_ms=1.0, endpoint="http://b")
REJECTED = m.Rejected(code="no-worker", message="nobody waits")

EVENTS: dict[str, Any] = {
    type(event).__name__: event
    for event in (
        HELLO,
        m.Admitted(incarnation=1, path="staged", lanes=1),
        REJECTED,
        BEGIN,
        m.Prepared(),
        m.Round(number=3, final=False, table=True),
        m.TablePart(number=2, first=0, digests=bytes(16)),
        m.TableEnd(number=2),
        m.Progress(bytes=4096),
        m.Pausing(),
        m.Landed(number=2, leaves=2, bytes=2000, ms=50.0),
        SEALED,
        VERIFIED,
        COMMITTED,
        ADOPTED,
        m.Released(),
        m.Abort(code="cancelled", message="by an operator"),
        p.Start(hello=HELLO),
        p.RecordBegun(),
        p.PathOffered(begin=BEGIN),
        p.PreparedHere(),
        p.LandedHere(block=12),
        p.TableDone(number=2),
        p.WorldPaused(block=12),
        p.WorldSealed(sealed=SEALED),
        p.WorldReleased(),
        p.AdmitOk(admitted=m.Admitted(incarnation=1, path="staged", lanes=1)),
        p.AdmitRefused(rejected=REJECTED),
        p.PathReady(),
        p.RoundComplete(number=2, leaves=2, bytes=2000, ms=4.0),
        p.DamageFound(leaves=2),
        p.Repaired(),
        p.MemoryVerified(verified=VERIFIED),
        p.RecordCommitted(committed=COMMITTED),
        p.RecordAdopted(adopted=ADOPTED),
        p.RecordSettled(outcome="aborted"),
        p.PeerLost(message="connection reset"),
        p.Failed(code="deadline", message="too late"),
    )
}
"""One of everything that can happen to a machine, by name."""

EVENT_TYPES = {kind.__name__: kind for kind in (*p.Event.__subclasses__(), *get_args(m.PeerMessage))}

SHRINKING = (
    Taken(leaves=20, bytes=20_000, ms=90.0),
    Taken(leaves=9, bytes=9_000, ms=80.0),
)


def facts(role: Role, state: State, **changes: Any) -> Facts:
    """What a machine remembers of an ordinary live move when it is in `state`, with some of it changed."""
    known: dict[str, Any] = {"asked": True, "epoch": EPOCH, "path": "staged", "lanes": 1, "shown": state}
    if state is not State.REQUESTED:
        known |= {"recorded": True, "offered": True}
    if state in (State.COPYING, State.PAUSING):
        known |= {"round": 2, "rounds": SHRINKING[:1], "round_open": state is State.COPYING}
        known |= {"table_expected": state is State.COPYING}
    elif state is State.FINISHING:
        known |= {"round": 2, "rounds": SHRINKING[:1], "round_open": True, "table_expected": True}
    elif state not in (State.REQUESTED, State.ADMITTED, State.PREPARED):
        known |= {"round": 2, "rounds": SHRINKING, "sealed": SEALED, "complete": True}
    if state in (State.SETTLING, State.RECLAIMING):
        known |= {"code": "peer", "message": "connection reset", "shown": State.VERIFYING}
    needed = NEEDS.get(role, {})
    return replace(Facts(policy=POLICY), **{**known, **needed.get(changes.pop("event", ""), {}), **changes})


NEEDS: dict[Role, dict[str, dict[str, Any]]] = {
    "source": {
        "Start": {"asked": False, "epoch": 0},
        "RecordBegun": {"recorded": False, "offered": False},
        "PathOffered": {"offered": False},
        "Landed": {"table_expected": False},
        "LandedHere": {"table_expected": False, "round_open": False, "rounds": SHRINKING, "blocks": (3, 11)},
        "WorldSealed": {"table_expected": False},
        "Verified": {"complete": False},
    },
    "destination": {
        "Hello": {"asked": False, "epoch": 0},
        "Begin": {"offered": False},
        "Round": {"round_open": False, "table_expected": False},
        "Pausing": {"round_open": False, "table_expected": False},
        "RoundComplete": {"table_expected": False, "closing": True},
        "Sealed": {"table_expected": False, "closing": True},
    },
}
"""What must be different, beside the state, for an event to be expected."""


def machine(role: Role, state: State, **changes: Any) -> Machine:
    """A machine in the middle of a move."""
    made = Machine(role, POLICY)
    made.state = state
    made.facts = facts(role, state, **changes)
    made.history = ["earlier Event -> earlier"]
    return made


def names(actions: tuple[p.Action, ...]) -> list[str]:
    """Actions by type; a message by its own: `Send(Round)`."""
    return [
        f"Send({type(action.message).__name__})" if isinstance(action, p.Send) else type(action).__name__
        for action in actions
    ]
