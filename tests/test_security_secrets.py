"""Two real nodes with tokens and mutual TLS: worlds move, and no secret stands anywhere it can be read."""

from __future__ import annotations

import io
import logging
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import structlog
from fleet_node import Node, until
from security_kit import OPERATOR, PEER, WORKER, Authority, trusting, write_tokens

from api import logs
from worldmove import messages as m
from worldmove.cli.common import report
from worldmove.client import Client
from worldmove.descriptors import Fetch
from worldmove.errors import PeerError, SessionMoved, UnauthorizedError
from worldmove.page.messages import Hello, Rejoin
from worldmove.sdk.tickets import Ticket as WorkerTicket
from worldmove.sdk.tickets import write_ticket
from worldmove.views import MigrationRequest, NodeView, Ticket
from worldmove.worker import Worker, World

SPEC = {
    "regions": [{"name": "k", "dtype": "float32", "shape": [256, 1024]}],
    "block_ms": 20,
    "horizon_ms": 2000,
    "fingerprint": {"weights": "w"},
}
SECRETS = (OPERATOR, WORKER, PEER)


class Pair:
    """Nodes A and B, what was seen of them, and clients with each role's token."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.authority = Authority(folder)
        self.folder = folder
        self.nodes = {}
        self.spoken: list[str] = []
        tokens = write_tokens(folder / "tokens.toml")
        mark = uuid.uuid4().hex
        for name in ("A", "B"):
            cert = self.authority.sign(name)
            options = ["--tls-cert", str(cert.cert), "--tls-key", str(cert.key)]
            options += ["--tls-ca", str(self.authority.ca), "--token-file", str(tokens)]
            # The later option counts.
            self.nodes[name] = Node(name, folder, [*options, "--log-level", "debug"], mark).launch()
        for node in self.nodes.values():
            node.ready()
            stack.callback(node.stop)

    def client(self, name: str, token: str) -> Client:
        return Client(self.nodes[name].url, token, 60, self.authority.ca)

    def worker(self, name: str) -> Worker:
        return Worker(self.nodes[name].url, WORKER, tls_ca=self.authority.ca)

    def view(self, name: str) -> NodeView:
        with self.client(name, OPERATOR) as client:
            return client.node()

    def http(self, name: str, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"}
        context = trusting(self.authority)
        return httpx.Client(base_url=self.nodes[name].url, headers=headers, verify=context, timeout=60)

    def logs(self) -> str:
        return "".join(node.log.read_text() for node in self.nodes.values())


@contextmanager
def pair() -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="wm-s-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Pair(folder, stack)


def generate(world: World, moved: threading.Event) -> None:
    """Blocks until the world has gone."""
    try:
        while True:
            with world.block():
                world.tensor("k")[...] += 1
            world.boundary(b"state")
    except SessionMoved:
        moved.set()
    finally:
        world.close()


def move(both: Pair, source: str, target: str, path: str) -> None:
    """Moves a world that generates and ends it at its destination."""
    moved = threading.Event()
    with both.worker(source) as here, both.worker(target) as there:
        world = here.register(f"w-{path}", **SPEC)  # type: ignore[arg-type]
        running = threading.Thread(target=generate, args=(world, moved))
        running.start()
        arrived: list[World] = []
        waiting = threading.Thread(target=lambda: arrived.append(standby.wait()))
        standby = there.standby(**SPEC)  # type: ignore[arg-type]
        waiting.start()
        with both.client(source, OPERATOR) as client:
            request = MigrationRequest(session_id=f"w-{path}", destination=target, path=path)  # type: ignore[arg-type]
            assert client.dry_run(request).admissible
            view = client.wait(client.migrate(request, f"key-{path}").id)
            assert view.state == "released", (view.code, view.reason)
            assert view.path == path
            both.spoken.append(repr(view))
        running.join(30)
        waiting.join(30)
        assert moved.is_set()
        arrived[0].close()
        # The source has released the world; the destination's move ends a moment later.
        until(lambda: both.view(target).migrations == 0, "the move ends")
        there.end(f"w-{path}")


@pytest.mark.slow
def test_no_secret_is_logged_shown_or_measured() -> None:
    with pair() as both:
        move(both, "A", "B", "local")
        move(both, "B", "A", "staged")
        with both.http("A", WORKER) as http:
            body = SPEC | {"model": "m", "id": "open"}
            made = http.post("/v1/sessions", json=body).json()
            tickets = [ticket["token"] for ticket in made["tickets"]]
            for wrong in ({"Authorization": f"Bearer {OPERATOR}x"}, {"Authorization": f"Basic {OPERATOR}"}):
                both.spoken.append(http.get("/v1/node", headers=wrong).text)
            both.spoken.append(http.post("/v1/sessions", json=body | {"token": PEER, "model": 3}).text)
            both.spoken.append(http.post("/v1/migrations", json={"token": OPERATOR}).text)
            both.spoken += [
                http.get(path).text for path in ("/metrics", "/v1/node", "/v1/nodes", "/v1/sessions")
            ]
            # A worker's ticket that is wrong, and one that is right, at the Unix door.
            with pytest.raises(UnauthorizedError) as refused, both.worker("A") as worker:
                worker.join(write_ticket(WorkerTicket("open", made["socket"], 0, tickets[0] + "x")))
            both.spoken.append(str(refused.value))
            http.delete("/v1/sessions/open")
        logged = both.logs()
        assert '"level": "debug"' in logged
        for secret in (*SECRETS, *tickets, *(ticket.partition(".")[2] for ticket in tickets)):
            assert secret not in logged
            assert not [text for text in both.spoken if secret in text]
        keys = [path.read_text().splitlines()[1] for path in both.folder.glob("*.key")]
        assert not [key for key in keys if key in logged]
        for node in both.nodes.values():
            for pid in (node.pid, *_children(node.pid)):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                assert not [secret for secret in SECRETS if secret in command]


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_show_no_values_and_texts_no_tokens(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before = list(root.handlers), root.level
    known = structlog.get_config()
    try:
        logs.configure("debug", form)  # type: ignore[arg-type]
        log = structlog.get_logger("worldmove.test")
        _fail(log, OPERATOR)
        log.info("nested", request={"headers": {"Authorization": OPERATOR}, "list": [{"token": WORKER}]})
        said = f"sent Authorization: Bearer {PEER}"
        log.info(said, note=f"bearer {PEER}")
        logging.getLogger("websockets.client").debug("> Authorization: Bearer %s", PEER)
        logging.getLogger("websockets.client").info("> Authorization: Bearer %s", PEER)
        logging.getLogger("httpcore.http11").debug("headers=%s", [(b"Authorization", PEER)])
    finally:
        root.handlers, root.level = before
        structlog.configure(**known)
    text = written.getvalue()
    assert "ZeroDivisionError" in text
    assert "_fail" in text
    assert "nested" in text
    for secret in SECRETS:
        assert secret not in text


def test_no_name_writes_to_a_readers_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths and reasons come from outside: neither log nor command line hands their control characters on."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before = list(root.handlers), root.level
    known = structlog.get_config()
    hostile = "/v1/\x1b[31mred\r\n2026 [info] forged \x9b2J\u202e"
    try:
        for form in ("json", "console"):
            logs.configure("debug", form)  # type: ignore[arg-type]
            structlog.get_logger("worldmove.test").info("request", path=hostile)
            structlog.get_logger("worldmove.test").info(hostile)
    finally:
        root.handlers, root.level = before
        structlog.configure(**known)
    report(PeerError(hostile, owner=hostile), as_json=False)
    lines = written.getvalue().splitlines()
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines), lines


def _fail(log: structlog.stdlib.BoundLogger, operator_token: str) -> None:
    headers = {"authorization": f"Bearer {operator_token}"}
    try:
        len(headers) / 0
    except ZeroDivisionError:
        log.exception("failed")


def test_messages_with_tokens_do_not_show_them() -> None:
    secret = b"s" * 32
    offer = m.LaneOffer("h", 1, secret)
    shown = [
        repr(offer),
        repr(m.Begin(lanes=(offer,), token=secret)),
        repr(Fetch(secret)),
        repr(Hello("s" * 32)),
        repr(Rejoin("slot", 0, "s" * 32, 1, stopped=False, waiting=False)),
        repr(Ticket(rank=0, token="s" * 32)),
    ]
    assert not [text for text in shown if "s" * 32 in text]
