"""Who is let in at the door, and that nothing a stranger does there harms anybody."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosting_kit import NOWHERE, Caller, HostKit, descriptors, host_kit, line, spec

from worldmove.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    ProtocolError,
    UnauthorizedError,
    WorldMoveError,
)
from worldmove.hosting import door as doors
from worldmove.hosting.tickets import TicketBook
from worldmove.page.messages import (
    Bye,
    Ended,
    Hello,
    Message,
    Paused,
    Ready,
    Refused,
    Rejoin,
    Welcome,
)
from worldmove.sdk.problems import _classes, error_of


async def test_a_token_opens_once(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 4)
    first = Caller(kit)
    welcome = await first.say(Hello(ticket.token))
    assert isinstance(welcome, Welcome)
    assert (welcome.session_id, welcome.rank, welcome.ranks, welcome.epoch) == ("w", 0, 1, 4)
    assert welcome.manifest == slot.manifest
    assert welcome.secret not in repr(welcome)
    second = Caller(kit)
    refused = await second.say(Hello(ticket.token))
    assert isinstance(refused, Refused)
    assert refused.code == UnauthorizedError.code
    await second.gone()
    await first.hear()
    await first.channel.send(Ready())
    await kit.changes.wait(slot, "attached")
    first.channel.close()
    await kit.changes.wait(slot, "lost")


@pytest.mark.parametrize("token", ["", ".", "x", "a.b", "é" * 100, "x" * 100_000])
async def test_a_wrong_token_is_refused(kit: HostKit, token: str) -> None:
    caller = Caller(kit)
    refused = await caller.say(Hello(token))
    assert isinstance(refused, Refused)
    assert refused.code == UnauthorizedError.code
    await caller.gone()


async def test_the_right_name_with_a_wrong_secret_leaves_the_token_good(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    caller = Caller(kit)
    refused = await caller.say(Hello(ticket.token[:-1] + "~"))
    assert isinstance(refused, Refused)
    await caller.gone()
    worker = await kit.worker()
    await worker("join", ticket=line("w", kit.host, ticket))
    assert slot.ranks.attended


async def test_tokens_die_with_their_session(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    kit.host.close_slot(slot, Ended("gone"))
    caller = Caller(kit)
    assert isinstance(await caller.say(Hello(ticket.token)), Refused)
    await caller.gone()
    worker = await kit.worker()
    assert (await worker("join", ticket=line("w", kit.host, ticket)))["error"] == "unauthorized"
    assert (await worker("join", ticket="nonsense"))["error"] == "validation"


@pytest.mark.parametrize(
    "message",
    [Ready(), Paused(3), Bye(), Hello("x.y", protocol=99), Rejoin("nobody", 0, "s", 1, True, False)],
    ids=lambda message: type(message).__name__,
)
async def test_a_first_message_out_of_turn_is_refused(kit: HostKit, message: Message) -> None:
    caller = Caller(kit)
    refused = await caller.say(message)
    assert isinstance(refused, Refused)
    assert refused.code in (ProtocolError.code, NotFoundError.code)
    await caller.gone()


@pytest.mark.parametrize("packet", [b"\0", b"x" * 12, b"x" * 60_000, os.urandom(500)])
async def test_garbage_closes_the_connection_and_nothing_else(kit: HostKit, packet: bytes) -> None:
    before = descriptors()
    for _ in range(20):
        caller = Caller(kit)
        caller.sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, memoryview(b"\0\0\0\0"))])
        await caller.gone()
    slot, _ = await kit.session()
    assert slot.ranks.attended
    assert descriptors() <= before + 8


async def test_silence_is_not_waited_for(kit: HostKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "FIRST_MESSAGE_S", 0.05)
    monkeypatch.setattr(doors, "READY_S", 0.05)
    silent = Caller(kit)
    refused = await silent.hear()
    assert isinstance(refused, Refused)
    assert refused.code == "deadline"
    await silent.gone()
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    half = Caller(kit)
    await half.say(Hello(ticket.token))
    await half.gone()
    assert not slot.ranks.attended


async def test_a_secret_of_another_rank_does_not_rejoin(kit: HostKit) -> None:
    slot, _ = await kit.session()
    for rank, secret in [(0, "wrong"), (1, slot.secrets[0]), (-1, slot.secrets[0]), (0, "")]:
        caller = Caller(kit)
        refused = await caller.say(Rejoin(slot.key, rank, secret, 0, False, False))
        assert isinstance(refused, Refused)
        assert refused.code == UnauthorizedError.code
        await caller.gone()
    assert slot.ranks.attended


async def test_a_rank_that_breaks_the_protocol_is_let_go(kit: HostKit) -> None:
    slot, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    caller = Caller(kit)
    await caller.enter(slot, ticket)
    await caller.channel.send(Paused(12345))
    await caller.gone()
    await kit.changes.wait(slot, "lost")
    assert slot.ranks.state == "unattended"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_refused(kit: HostKit) -> None:
    _, (ticket,) = await kit.host.open_session(spec(), "w", 1)
    assert kit.host.socket_path.stat().st_mode & 0o777 == 0o600
    kit.host.socket_path.parent.chmod(0o755)
    kit.host.socket_path.chmod(0o777)
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(1000))"
    )
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", code, str(kit.host.socket_path), stdout=-1, cwd="/"
    )
    answer, _ = await stranger.communicate()
    assert b"unauthorized" in answer
    worker = await kit.worker(NOWHERE)
    assert "error" not in await worker("join", ticket=line("w", kit.host, ticket))


async def test_a_rank_in_use_is_not_given_away(kit: HostKit) -> None:
    slot, (worker,) = await kit.session()
    with pytest.raises(ConflictError, match="every rank"):
        kit.host.attach("w", {"cpu": "x"})
    await worker("step", n=3)
    await worker.kill()
    await kit.changes.wait(slot, "lost")
    _, (first,) = kit.host.attach("w", {"cpu": "x"})
    _, (second,) = kit.host.attach("w", {"cpu": "x"})
    other = await kit.worker()
    late = await kit.worker()
    assert (await late("join", ticket=line("w", kit.host, first)))["error"] == "unauthorized"
    assert (await other("join", ticket=line("w", kit.host, second)))["block"] == 3


async def test_the_socket_replaces_a_former_one_and_goes_away(run_dir: Path) -> None:
    (run_dir / "node.sock").write_text("left over")
    async with host_kit(run_dir) as kit:
        assert kit.host.socket_path.is_socket()
    assert not kit.host.socket_path.exists()
    async with host_kit(run_dir) as first, host_kit(run_dir, incarnation=2) as second:
        slot, _ = await second.session()
        assert slot.ranks.attended
        await first.host.close()
        assert second.host.socket_path.is_socket()


async def test_a_path_that_takes_no_socket_names_the_option(run_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        async with host_kit(run_dir / ("long" * 40)):
            pass
    assert caught.value.details["option"] == "run_dir"


def test_a_ticket_book_forgets() -> None:
    book = TicketBook()
    tokens = {rank: book.issue("s", rank) for rank in range(3)}
    again = book.issue("s", 1)
    refusals: list[Callable[[], object]] = [lambda: book.redeem(tokens[1]), lambda: book.redeem("")]
    for refused in refusals:
        with pytest.raises(UnauthorizedError):
            refused()
    assert book.redeem(again) == ("s", 1)
    book.void("s")
    with pytest.raises(UnauthorizedError):
        book.redeem(tokens[0])
    assert not book._open
    assert not book._of


def test_every_error_has_a_code_of_its_own() -> None:
    """A refusal carries only the code: the worker finds the class by it."""
    kinds = list(_classes(WorldMoveError))
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert type(error_of(kind.code, "why", {"field": "f"})) is kind
    assert error_of("of a later version", "why").details["code"] == "of a later version"
