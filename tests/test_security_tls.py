"""TLS on served nodes: who trusts whom, peers' certificates, a change of certificates without a restart."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faces_kit import served
from security_kit import OPERATOR, PEER, WORKER, Authority, open_socket, shown_by, trusting, write_tokens
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from worldmove import errors
from worldmove.client import AsyncClient, Client
from worldmove.config import load
from worldmove.errors import ConfigError
from worldmove.node.peers import connect_peer
from worldmove.tls import Identity, NodeTls, client_context
from worldmove.worker import Worker


@dataclass
class Site:
    """A served node with TLS, its authority, and a foreign one."""

    url: str
    authority: Authority
    stranger: Authority
    tokens: Path


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        folder = Path(name)
        authority, stranger = Authority(folder), Authority(folder, "stranger")
        node = authority.sign("node")
        tokens = write_tokens(folder / "tokens.toml")
        (folder / "run").mkdir(mode=0o700)
        options = {"tls_cert": node.cert, "tls_key": node.key, "tls_ca": authority.ca, "token_file": tokens}
        with served(folder / "run", *(f"{key}={value}" for key, value in options.items())) as (url, _):
            yield Site(url, authority, stranger, tokens)


def test_the_url_is_https_and_clients_trust_the_authority_only(site: Site) -> None:
    assert site.url.startswith("https://127.0.0.1:")
    with Client(site.url, OPERATOR, tls_ca=site.authority.ca) as client:
        assert client.node().url == site.url
    with Client(site.url, OPERATOR, tls_ca=site.stranger.ca) as client, pytest.raises(errors.PeerError):
        client.node()
    with Client(site.url, OPERATOR) as client, pytest.raises(errors.PeerError, match="certificate"):
        client.node()


async def test_the_other_faces_trust_it_too(site: Site) -> None:
    async with AsyncClient(site.url, WORKER, tls_ca=site.authority.ca) as client:
        assert (await client.node()).name == "A"
    with Worker(site.url, WORKER, tls_ca=site.authority.ca) as worker, pytest.raises(errors.NotFoundError):
        worker.attach("none")
    with Worker(site.url, WORKER) as worker, pytest.raises(errors.PeerError):
        worker.attach("none")


def test_the_command_line_trusts_it_too(site: Site) -> None:
    answer = subprocess.run(
        ["worldmove", "nodes", "--url", site.url, "--tls-ca", site.authority.ca, "--json"],
        executable=Path(sys.executable).parent / "worldmove",
        env=os.environ | {"WORLDMOVE_TOKEN": OPERATOR},
        capture_output=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert site.url.encode() in answer.stdout


def test_plain_http_and_old_protocols_are_refused(site: Site) -> None:
    with Client(site.url.replace("https", "http"), OPERATOR) as client, pytest.raises(errors.WorldMoveError):
        client.node()
    old = trusting(site.authority)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with open_socket(site.url) as plain, pytest.raises((ssl.SSLError, ConnectionResetError)):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


async def test_a_peer_needs_certificate_and_token(site: Site) -> None:
    peer = site.authority.sign("peer")
    mutual = trusting(site.authority, peer)
    channel = await connect_peer(site.url, "m1", PEER, 5000, mutual)
    await channel.send(b"hello ")
    assert await channel.receive() == b"hello m1"
    await channel.close()
    for context, token, status in (
        (trusting(site.authority), PEER, 401),
        (mutual, None, 401),
        (mutual, "x" * 30, 401),
        (mutual, OPERATOR, 403),
    ):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        address = site.url.replace("https", "wss") + "/v1/peer/moves/m"
        with pytest.raises(InvalidStatus) as caught:
            await connect(address, ssl=context, additional_headers=headers, proxy=None)
        assert caught.value.response.status_code == status
    foreign = trusting(site.authority, site.stranger.sign("foreign"))
    with pytest.raises(errors.PeerError):
        await connect_peer(site.url, "m", PEER, 5000, foreign)
    with pytest.raises(errors.PeerError, match="certificate"):
        await connect_peer(site.url, "m", PEER, 5000, client_context(site.stranger.ca))


def test_certificates_and_authorities_change_without_a_restart(site: Site, tmp_path: Path) -> None:
    before = shown_by(site.url, site.authority)
    site.authority.sign("node")
    after = shown_by(site.url, site.authority)
    assert after != before
    cert = site.authority.ca.with_name("node.pem")
    good = cert.read_bytes()
    cert.write_text("half a certificate")
    assert shown_by(site.url, site.authority) == after
    cert.write_bytes(good)
    assert shown_by(site.url, site.authority) == after


def test_tokens_change_without_a_restart(site: Site) -> None:
    fresh = "fresh-" + "f" * 20
    with Client(site.url, fresh, tls_ca=site.authority.ca) as client:
        with pytest.raises(errors.UnauthorizedError):
            client.node()
        write_tokens(site.tokens, operator=fresh)
        assert client.node().name == "A"
        with Client(site.url, OPERATOR, tls_ca=site.authority.ca) as old:
            with pytest.raises(errors.UnauthorizedError):
                old.node()
            write_tokens(site.tokens)
            assert old.node().name == "A"


def test_a_removed_authority_is_no_longer_trusted(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
    pair = new.sign("node")
    tls = NodeTls(Identity(*pair), trusted)
    first = tls.client
    assert tls.client is first
    assert len(first.get_ca_certs()) == 2
    trusted.write_bytes(new.ca.read_bytes())
    assert len(tls.client.get_ca_certs()) == 1
    trusted.write_text("nonsense")
    assert len(tls.client.get_ca_certs()) == 1


def test_bad_files_stop_the_start_and_show_no_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.sign("node"), authority.sign("other")
    secret = pair.key.read_text().splitlines()[1]
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    nonsense.chmod(0o600)
    for identity, ca, option in (
        (Identity(pair.cert, other.key), None, "tls_cert"),
        (Identity(nonsense, pair.key), None, "tls_cert"),
        (Identity(pair.cert, nonsense), None, "tls_cert"),
        (Identity(pair.cert, tmp_path / "none"), None, "tls_cert"),
        (Identity(*pair), nonsense, "tls_ca"),
        (None, nonsense, "tls_ca"),
    ):
        with pytest.raises(ConfigError) as caught:
            NodeTls(identity, ca)
        assert caught.value.details["option"] == option
        assert secret not in str(caught.value)
    pair.key.chmod(0o644)
    with pytest.raises(ConfigError, match="0644"):
        NodeTls(Identity(*pair), None)
    with pytest.raises(ConfigError, match="tls_cert is missing"):
        NodeTls(None, authority.ca).server()
    with pytest.raises(ConfigError, match="tls_ca"):
        Client("https://127.0.0.1:1", tls_ca=nonsense)


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("node")
    base = {"name": "A", "tls_cert": pair.cert}
    with pytest.raises(ConfigError, match="tls_key is missing"):
        load(base, environ={})
    with pytest.raises(ConfigError, match="tls_cert is missing"):
        load({"name": "A", "tls_key": pair.key}, environ={})
    whole = base | {"tls_key": pair.key}
    with pytest.raises(ConfigError, match="https URL"):
        load(whole | {"advertise": "http://a"}, environ={})
    assert load(whole, environ={}).url(7) == "https://127.0.0.1:7"
    assert load(whole | {"advertise": "https://a"}, environ={}).url(7) == "https://a"


def test_an_owner_without_tls_is_not_told_the_token(site: Site) -> None:
    from worldmove.client.answers import owner_of  # noqa: PLC0415

    error = errors.NotOwnerError("elsewhere", owner_url="http://b")
    assert owner_of(error, set(), "https://a") is None
    assert owner_of(error, set(), "http://a") == "http://b"
