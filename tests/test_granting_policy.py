"""Who is granted when: the gate's policy by property, against a model of what is out."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worldmove.granting.bucket import Bucket
from worldmove.granting.meter import Epoch
from worldmove.granting.pace import Pace
from worldmove.granting.policy import Member, Policy, Request

RATE, BURST, MOST = 500.0, 300, 1000
LARGEST = 2000
SENDERS = ("A", "B", "C", "D")


class Gate(RuleBasedStateMachine):
    """Moves come, ask, stand, land, crash and leave in any order; a bucket paces them."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace(most_senders=3, most_bytes=MOST)
        self.policy = Policy(Bucket(RATE, BURST), self.pace, most_bytes=MOST)
        self.now = 0.0
        self.members: list[Member] = []
        self.waiting: list[Request] = []
        self.out: list[Request] = []
        self.spent = 0

    def serve(self) -> float | None:
        before = {member: member.key for member in self.members}
        granted, wait = self.policy.due(self.now)
        for request in granted:
            others = sum(one.nbytes for one in self.out)
            assert not self.out or others + request.nbytes <= MOST
            self.out.append(request)
            self.waiting.remove(request)
            self.spent += request.nbytes
            senders = {one.member.sender for one in self.out}
            assert len(senders) <= self.policy.allowed[0] or request.member.sender in {
                one.member.sender for one in self.out if one is not request
            }
            ahead = [m for m in before if m.waiting and m.sender == request.member.sender]
            assert all(before[request.member] <= before[m] for m in ahead)
        return wait

    @rule(sender=st.sampled_from(SENDERS), deadline=st.floats(0, 100))
    def join(self, sender: str, deadline: float) -> None:
        self.members.append(self.policy.join(f"m{len(self.members)}", sender, deadline))

    @precondition(lambda self: self.members)
    @rule(data=st.data(), nbytes=st.integers(1, LARGEST))
    def ask(self, data: st.DataObject, nbytes: int) -> None:
        member = data.draw(st.sampled_from(self.members))
        self.waiting.append(self.policy.ask(member, nbytes))
        self.serve()

    @precondition(lambda self: self.members)
    @rule(data=st.data(), until=st.none() | st.floats(0, 100))
    def stand(self, data: st.DataObject, until: float | None) -> None:
        self.policy.stand(data.draw(st.sampled_from(self.members)), until)
        self.serve()

    @rule(gap=st.floats(0, 10))
    def wait(self, gap: float) -> None:
        self.now += gap
        self.serve()

    @precondition(lambda self: self.out)
    @rule(data=st.data(), how=st.sampled_from(("landed", "lost", "unused")))
    def back(self, data: st.DataObject, how: str) -> None:
        request = data.draw(st.sampled_from(self.out))
        self.out.remove(request)
        if how == "landed":
            self.policy.landed(request, self.now)
        elif how == "lost":
            self.policy.give_back(request, self.now)
        else:
            self.policy.undo(request, self.now)
            self.spent -= request.nbytes
        self.policy.landed(request, self.now)  # again: counts for nothing
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.policy.withdraw(request)
        self.serve()

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.members))
        self.members.remove(member)
        forgotten = self.policy.leave(member, self.now)
        assert set(forgotten) == {one for one in self.waiting if one.member is member}
        self.waiting = [one for one in self.waiting if one.member is not member]
        self.out = [one for one in self.out if one.member is not member]
        assert self.policy.leave(member, self.now) == []
        assert self.policy.ask(member, 1).settled
        self.serve()

    @invariant()
    def conserves(self) -> None:
        assert self.policy.outstanding == sum(one.nbytes for one in self.out)
        assert self.policy.waiting == len(self.waiting)
        assert self.policy.senders == len({one.member.sender for one in self.out})
        assert self.policy.granted == self.spent <= BURST + RATE * self.now + LARGEST + 1
        for member in self.members:
            assert member.outstanding == sum(one.nbytes for one in self.out if one.member is member)

    def teardown(self) -> None:
        """Nobody starves: with time passing and grants landing, every request is granted."""
        for _ in range(3 * (len(self.waiting) + len(self.out)) + 3):
            for request in self.out:
                self.policy.landed(request, self.now)
            self.out.clear()
            self.now += self.serve() or 0.0
        assert not self.waiting
        assert self.policy.outstanding == sum(one.nbytes for one in self.out)


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def policy(senders: int = 1, window: int = 1000) -> Policy:
    pace = Pace(most_senders=8, most_bytes=window)
    pace.senders = senders
    return Policy(Bucket(None, 1), pace)


def names(granted: list[Request]) -> list[str]:
    return [request.member.name for request in granted]


def test_a_paused_world_goes_first_and_has_the_line() -> None:
    gate = policy()
    copying = gate.join("copying", "A", deadline=1.0)
    late, soon = gate.join("late", "B", deadline=9.0), gate.join("soon", "C", deadline=9.0)
    first = gate.ask(copying, 500)
    assert names(gate.due(0.0)[0]) == ["copying"]
    gate.stand(late, 0.9)
    gate.stand(soon, 0.5)
    for member in (late, soon, copying):
        gate.ask(member, 400)
    assert gate.due(0.0) == ([], None), "one sender at a time: the line is being vacated"
    gate.landed(first, 0.1)
    granted, _ = gate.due(0.1)
    assert names(granted) == ["soon"]
    gate.landed(granted[0], 0.2)
    granted, _ = gate.due(0.2)
    assert names(granted) == ["late"]
    gate.landed(granted[0], 0.3)
    assert names(gate.due(0.3)[0]) == ["copying"]


def test_the_sender_of_a_paused_world_sends_nothing_else_meanwhile() -> None:
    gate = policy(senders=2)
    standing, copying = gate.join("standing", "A", deadline=9.0), gate.join("copying", "A", deadline=1.0)
    other = gate.join("other", "B", deadline=2.0)
    gate.stand(standing, 0.9)
    last = gate.ask(standing, 300)
    for member in (copying, other):
        gate.ask(member, 300)
    assert names(gate.due(0.0)[0]) == ["standing", "other"]
    gate.landed(last, 0.1)
    assert names(gate.due(0.1)[0]) == ["copying"]


def test_copying_moves_go_by_deadline_and_share_what_the_first_leaves() -> None:
    gate = policy(senders=2)
    second, first = gate.join("second", "A", deadline=5.0), gate.join("first", "B", deadline=2.0)
    third = gate.join("third", "C", deadline=9.0)
    for member in (third, second, first):
        gate.ask(member, 300)
    assert names(gate.due(0.0)[0]) == ["first", "second"]


def test_moves_of_one_sender_have_no_more_out_than_one_of_them_alone() -> None:
    """What a world that stops has to wait for does not grow with the number of moves that copy."""
    gate = policy(senders=2, window=10_000)
    moves = [gate.join(f"m{number}", "A", deadline=float(number)) for number in range(5)]
    other = gate.join("other", "B", deadline=99.0)
    out = [gate.ask(member, 10) for member in moves for _ in range(2)] + [gate.ask(other, 10)]
    assert names(gate.due(0.0)[0]) == ["m0", "m0", "other"]
    gate.landed(out[0], 0.1)
    gate.ask(moves[0], 10)
    assert names(gate.due(0.1)[0]) == ["m0"]
    gate.landed(out[1], 0.2)
    gate.stand(moves[4], 1.0)
    assert names(gate.due(0.2)[0]) == ["m4", "m4"], "a world that stands has what it wants"


def test_a_request_larger_than_the_bound_is_granted_alone() -> None:
    gate = policy(window=100)
    large, small = gate.join("large", "A", 1.0), gate.join("small", "A", 2.0)
    out = gate.ask(small, 50)
    gate.due(0.0)
    gate.ask(large, 5000)
    gate.ask(small, 10)
    assert gate.due(0.0) == ([], None), "nothing overtakes"
    gate.landed(out, 0.1)
    assert names(gate.due(0.1)[0]) == ["large"]


def test_a_sender_that_was_held_up_says_nothing_about_the_line() -> None:
    epochs: list[Epoch] = []
    gate = Policy(Bucket(None, 1), Pace(), lambda epoch, _now: epochs.append(epoch), patience_s=1.0)
    member, now = gate.join("m", "A"), 0.0
    for took in (0.08, 5.0, 0.08, 0.08):  # stopped for five seconds, and then it went on
        gate.ask(member, gate.pace.window)
        ((request,), _) = gate.due(now)
        now += took
        gate.landed(request, now)
    (epoch,) = epochs
    assert epoch.seconds < 1
    assert epoch.nbytes == 2 * gate.pace.window


def test_grants_that_stay_out_are_named() -> None:
    gate = policy()
    member = gate.join("m", "A")
    gate.ask(member, 10)
    (request,), _ = gate.due(1.0)
    assert gate.overdue(2.0, 1.5) == []
    assert gate.overdue(3.0, 1.5) == [request]
    gate.leave(member, 3.0)
    assert gate.overdue(3.0, 1.5) == []


def test_the_time_after_a_move_that_left_its_grants_is_not_the_lines() -> None:
    """Its lanes were killed: until the next move sends, nobody has anything to bring."""
    epochs: list[Epoch] = []
    gate = Policy(Bucket(None, 1), Pace(), lambda epoch, _now: epochs.append(epoch))
    gone, now = gate.join("gone", "A"), 1.0
    gate.ask(gone, gate.pace.window)
    assert gate.due(now)[0]
    gate.leave(gone, now)
    now += 60.0
    after = gate.join("after", "A")
    for _ in range(3):
        gate.ask(after, gate.pace.window)
        ((request,), _) = gate.due(now)
        now += 0.08
        gate.landed(request, now)
    assert max(epoch.seconds for epoch in epochs) < 1


def carry(gate: Policy, member: Member, seconds: float) -> None:
    """Two grants at a time, each half of the bound, on a line where every grant costs ten milliseconds."""
    now, asked = 0.0, 0
    out: list[Request] = []
    while now < seconds:
        while asked < 2:
            gate.hold_back()
            gate.ask(member, gate.allowed[1] // 2)
            asked += 1
        out += gate.due(now)[0]
        now += out[0].nbytes / 1e9 + 0.01
        gate.landed(out.pop(0), now)
        asked -= 1


def test_a_window_that_cuts_grants_short_is_widened_while_a_world_is_copied() -> None:
    gate = Policy(Bucket(None, 1), Pace())
    cold = gate.allowed[1]
    carry(gate, gate.join("m", "A"), 60.0)
    assert gate.allowed[1] >= 8 * cold


def test_a_window_stays_as_it_is_while_a_world_stands() -> None:
    gate = Policy(Bucket(None, 1), Pace())
    before, member = gate.allowed[1], gate.join("m", "A")
    gate.stand(member, 60.0)
    carry(gate, member, 60.0)
    assert gate.allowed[1] == before
