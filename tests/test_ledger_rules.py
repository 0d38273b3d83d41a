"""The table of allowed changes, looked at from every side; pure."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from ledger_kit import ROOT, move_ref, node_info, session
from msgspec.structs import asdict, replace

from worldmove.errors import FencedError, LostRaceError, ProtocolError, SessionExistsError, ValidationError
from worldmove.ledger import transactions
from worldmove.ledger.lease import Liveness
from worldmove.ledger.memory import MemoryStore
from worldmove.ledger.records import (
    Claim,
    SessionRecord,
    abort,
    adopt,
    begin,
    check_record,
    commit,
    current_move,
    end,
    fate,
    forestall,
    reclaim,
    release,
    retake,
    update,
)
from worldmove.ledger.rules import TRANSITIONS, check_swap

A, A2, B, B2, C = Claim("a", 1), Claim("a", 2), Claim("b", 1), Claim("b", 2), Claim("c", 1)
OWNED = session(A)
MOVING = begin(OWNED, move_ref(A, B))
COMMITTED = commit(MOVING, block=5, revision=1, root=ROOT)
ADOPTED = adopt(COMMITTED, B, endpoint="ws://b")
RELEASED = release(ADOPTED, B)
ENDED = end(OWNED)
RECORDS = (OWNED, MOVING, COMMITTED, ADOPTED, RELEASED, ENDED)

LEGAL: list[tuple[str, SessionRecord, SessionRecord, set[Claim]]] = [
    ("begin", OWNED, MOVING, {A}),
    ("forestall", OWNED, forestall(OWNED, "move-0"), {A}),
    ("forestall", RELEASED, forestall(RELEASED, "move-0"), {B}),
    ("abort", MOVING, abort(MOVING, A), {A, B, B2}),
    ("abort", MOVING, abort(MOVING, A2), {A2}),
    ("commit", MOVING, COMMITTED, {B}),
    ("adopt", COMMITTED, ADOPTED, {B}),
    ("adopt", COMMITTED, adopt(COMMITTED, B2, endpoint=None), {B2}),
    ("reclaim", COMMITTED, reclaim(COMMITTED, A), {A}),
    ("reclaim", COMMITTED, reclaim(COMMITTED, A2), {A2}),
    ("release", ADOPTED, RELEASED, {A, A2, B}),
    ("release", ADOPTED, release(ADOPTED, B2), {B2}),
    ("retake", OWNED, retake(OWNED, A2), {A2}),
    ("retake", ADOPTED, retake(ADOPTED, B2), {B2}),
    ("update", OWNED, update(OWNED, block=9, revision=2, endpoint="x"), {A}),
    ("update", ADOPTED, update(ADOPTED, block=9, revision=2, endpoint="x"), {B}),
    ("end", OWNED, ENDED, {A}),
    ("end", RELEASED, end(RELEASED), {B}),
]


@pytest.mark.parametrize(("name", "old", "new", "writers"), LEGAL)
def test_each_step_is_for_its_writers_only(
    name: str, old: SessionRecord, new: SessionRecord, writers: set[Claim]
) -> None:
    for by in (A, A2, B, B2, C, Claim("a", 0)):
        if by in writers:
            assert check_swap(old, new, by).name == name
        else:
            with pytest.raises(ProtocolError):
                check_swap(old, new, by)


def test_every_transition_is_tried_above() -> None:
    tried = {(name, old.phase, new.phase) for name, old, new, _ in LEGAL}
    assert tried == {(step.name, step.before, step.after) for step in TRANSITIONS}


def test_the_documented_table_is_the_table() -> None:
    text = (Path(__file__).parent.parent / "docs" / "ledger.md").read_text()
    rows = text.split("<!-- transitions -->")[1].split("<!-- /transitions -->")[0].strip().splitlines()[2:]
    assert rows == [
        f"| `{step.name}` | `{step.before}` | `{step.after}` | {', '.join(sorted(step.writers))} |"
        f" {'yes' if step.exact else 'no'} |"
        for step in TRANSITIONS
    ]


@pytest.mark.parametrize(("name", "old", "new", "writers"), LEGAL)
def test_no_step_changes_a_field_it_does_not_own(
    name: str, old: SessionRecord, new: SessionRecord, writers: set[Claim]
) -> None:
    free = {
        "commit": {"block", "revision", "root"},
        "adopt": {"endpoint"},
        "update": {"block", "revision", "endpoint"},
        "forestall": {"last_move_id"},
    }.get(name, set())
    other = {
        "session_id": "x",
        "epoch": 9,
        "owner": "z",
        "incarnation": 9,
        "model": "x",
        "block": 99,
        "revision": 99,
        "endpoint": "x2",
        "root": "cd" * 32,
        "outcome": "reclaimed" if new.outcome != "reclaimed" else "released",
        "last_move_id": "x",
    }
    for field, value in other.items():
        changed = replace(new, **{field: value})
        for by in writers:
            if field in free:
                assert check_swap(old, changed, by).name == name
                continue
            with pytest.raises((ProtocolError, ValidationError)):
                check_swap(old, changed, by)


def test_no_other_pair_of_phases_is_allowed() -> None:
    allowed = {(step.before, step.after) for step in TRANSITIONS}
    for old, new in itertools.product(RECORDS, RECORDS):
        if (old.phase, new.phase) not in allowed:
            for by in (A, A2, B, B2, C):
                with pytest.raises(ProtocolError) as refused:
                    check_swap(old, new, by)
                assert refused.value.details["history"] == [old.phase, new.phase]


def test_block_and_revision_never_fall() -> None:
    for fields in ({"block": 2}, {"revision": 0}):
        with pytest.raises(ProtocolError) as refused:
            check_swap(OWNED, replace(OWNED, **fields), A)
        assert refused.value.details["fields"] == list(fields)
        with pytest.raises(ProtocolError):
            check_swap(MOVING, replace(COMMITTED, **fields), B)


def test_a_commit_needs_a_root_and_a_move_id_is_used_once() -> None:
    with pytest.raises(ProtocolError):
        check_swap(MOVING, replace(COMMITTED, root=None), B)
    aborted = abort(MOVING, A)
    with pytest.raises(ProtocolError, match="used before"):
        check_swap(aborted, begin(aborted, move_ref(A, B)), A)
    check_swap(aborted, begin(aborted, move_ref(A, B, "move-2")), A)


def test_a_move_starts_at_the_owner() -> None:
    with pytest.raises(ValidationError):
        check_swap(OWNED, begin(OWNED, move_ref(A2, B)), A)
    with pytest.raises(ValidationError):
        check_swap(OWNED, begin(OWNED, move_ref(C, B)), A)
    with pytest.raises(ProtocolError):
        current_move(OWNED)


def test_a_move_within_one_node() -> None:
    moving = begin(OWNED, move_ref(A, A))
    committed = commit(moving, block=5, revision=1, root=ROOT)
    adopted = adopt(committed, A, endpoint=None)
    for old, new in (
        (OWNED, moving),
        (moving, committed),
        (committed, adopted),
        (adopted, release(adopted, A)),
    ):
        check_swap(old, new, A)
    check_swap(committed, reclaim(committed, A), A)


def test_records_that_contradict_themselves() -> None:
    for record in (
        replace(OWNED, move=move_ref(A, B)),
        replace(MOVING, move=None),
        replace(COMMITTED, owner="a"),
        replace(ADOPTED, owner="c"),
        replace(OWNED, outcome="aborted"),
        replace(MOVING, move=move_ref(A, Claim("b", 0))),
        replace(MOVING, move=move_ref(A, B, "")),
    ):
        with pytest.raises(ValidationError):
            check_record(record)


def test_fate() -> None:
    assert [fate(record, "move-1") for record in (MOVING, COMMITTED, ADOPTED, RELEASED)] == [
        "moving",
        "committed",
        "adopted",
        "released",
    ]
    assert fate(abort(MOVING, A), "move-1") == "aborted"
    assert fate(reclaim(COMMITTED, A), "move-1") == "reclaimed"
    assert fate(OWNED, "move-1") == "superseded"
    assert fate(begin(abort(MOVING, A), move_ref(A, B, "move-2")), "move-1") == "aborted"


def test_liveness_is_judged_by_change_not_by_clocks() -> None:
    watch = Liveness(2.0)
    a, b = replace(node_info("a"), incarnation=1), replace(node_info("b"), incarnation=1)
    assert watch.observe([a, b], 100.0) == {"a": True, "b": True}
    assert watch.observe([a, replace(b, beat=1)], 102.5) == {"a": False, "b": True}
    assert watch.observe([replace(a, incarnation=2), replace(b, beat=1)], 104.5) == {"a": True, "b": True}
    assert watch.observe([replace(b, beat=1)], 104.6) == {"b": False}
    assert watch.observe([replace(a, incarnation=2), replace(b, beat=1)], 104.7) == {"a": True, "b": False}


class Races(RuleBasedStateMachine):
    """Nodes that restart and act on whatever they ever read, against one store.

    Every proposal may be old, repeated or by a dead incarnation. Whatever happens: the epoch never falls, a
    move has one outcome, ownership changes only by a commit or a reclaim, and the fenced write nothing.
    """

    read = Bundle("read")
    names = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.claims: dict[str, list[Claim]] = {}
        self.history: list[SessionRecord] = []
        self.fates: dict[str, list[str]] = {}
        self.moves = 0

    @initialize(target=read)
    def start(self) -> SessionRecord:
        for name in ("a", "b", "c"):
            self.claims[name] = [transactions.claim_name(self.store, node_info(name))]
        return self.note(transactions.create(self.store, self.claims["a"][-1], session(self.claims["a"][-1])))

    def note(self, record: SessionRecord) -> SessionRecord:
        if not self.history or self.history[-1] != record:
            self.history.append(record)
            if record.move is not None:
                seen = self.fates.setdefault(record.move.move_id, [])
                if not seen or seen[-1] != record.phase:
                    seen.append(record.phase)
            elif record.last_move_id is not None and record.outcome is not None:
                seen = self.fates.setdefault(record.last_move_id, [])
                if not seen or seen[-1] != record.outcome:
                    seen.append(record.outcome)
        return record

    @rule(name=names)
    def restart(self, name: str) -> None:
        self.claims[name].append(transactions.claim_name(self.store, node_info(name)))

    @rule(
        target=read,
        old=read,
        name=names,
        step=st.sampled_from([step.name for step in TRANSITIONS]),
        dead=st.booleans(),
        to=names,
    )
    def disturb(self, old: SessionRecord, name: str, step: str, dead: bool, to: str) -> SessionRecord:
        """Any step on any record that was ever read, by anyone."""
        return self.propose(old, name, step, dead, to)

    def propose(self, old: SessionRecord, name: str, step: str, dead: bool, to: str) -> SessionRecord:
        by = self.claims[name][0 if dead else -1]
        new = self.build(old, by, step, self.claims[to][-1])
        before = self.store.session("world")
        assert before is not None
        try:
            transactions.swap(self.store, by, old, new)
        except (FencedError, LostRaceError, ProtocolError, ValidationError):
            assert self.store.session("world") == before
        else:
            assert by == self.claims[name][-1]
            assert before in (old, new)
        stands = self.store.session("world")
        assert stands is not None
        return self.note(stands)

    @rule(target=read, picks=st.lists(st.integers(0, 10), min_size=1, max_size=6), to=names)
    def advance(self, picks: list[int], to: str) -> SessionRecord:
        """Steps that the table allows, by whom it allows them: what `disturb` is mixed with."""
        for pick in picks:
            old = self.history[-1]
            latest = self.claims[old.owner][-1]
            if old.phase in ("owned", "adopted") and old.holder != latest:
                old = self.propose(old, old.owner, "retake", False, to)
            steps = [
                step
                for step in TRANSITIONS
                if step.before == old.phase and step.name not in ("retake", "end")
            ]
            if steps:
                step = steps[pick % len(steps)]
                role = sorted(step.writers)[pick % len(step.writers)]
                name = old.owner if role == "owner" else getattr(current_move(old), role)
                self.propose(old, name, step.name, False, to)
        return self.history[-1]

    def build(self, old: SessionRecord, by: Claim, step: str, to: Claim) -> SessionRecord:
        self.moves += 1
        try:
            return {
                "begin": lambda: begin(old, move_ref(by, to, f"move-{self.moves}")),
                "forestall": lambda: forestall(old, f"move-{self.moves}"),
                "abort": lambda: abort(old, by),
                "commit": lambda: commit(old, block=old.block + 1, revision=old.revision, root=ROOT),
                "adopt": lambda: adopt(old, by, endpoint=by.name),
                "reclaim": lambda: reclaim(old, by),
                "release": lambda: release(old, by),
                "retake": lambda: retake(old, by),
                "update": lambda: update(old, block=old.block + 1, revision=old.revision, endpoint=None),
                "end": lambda: end(old),
            }[step]()
        except ProtocolError:
            return old

    @rule(target=read, name=names)
    def settle_last(self, name: str) -> SessionRecord:
        move = next((record.move for record in reversed(self.history) if record.move), None)
        try:
            if move is not None:
                transactions.settle(self.store, self.claims[name][-1], "world", move.move_id)
        except ProtocolError:
            assert name not in (move.source, move.destination)
        stands = self.store.session("world")
        assert stands is not None
        return self.note(stands)

    @rule(target=read, name=names)
    def register_again(self, name: str) -> SessionRecord:
        by = self.claims[name][-1]
        try:
            return self.note(transactions.create(self.store, by, session(by)))
        except SessionExistsError:
            return self.history[-1]

    @invariant()
    def holds(self) -> None:
        for before, after in itertools.pairwise(self.history[-3:]):
            assert after.epoch >= before.epoch
            if after.owner != before.owner:
                assert after.epoch == before.epoch + 1
                assert before.phase == "ended" or after.phase in ("committed", "owned")
            if after.epoch == before.epoch:
                assert after.block >= before.block
                assert asdict(after)["session_id"] == "world"
        for seen in self.fates.values():
            assert tuple(seen) in LIVES


LIVES = {
    life[:length]
    for life in (
        ("moving", "aborted"),
        ("aborted",),
        ("moving", "committed", "reclaimed"),
        ("moving", "committed", "adopted", "released"),
    )
    for length in range(1, len(life) + 1)
}

TestRaces = Races.TestCase
TestRaces.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
