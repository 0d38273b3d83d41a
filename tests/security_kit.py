"""What tests of security share: an authority, certificates, tokens, raw talk, a node to be left unharmed."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import socket
import ssl
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fleet_node import Node

OPERATOR, WORKER, PEER = ("operator-" + "o" * 20, "worker-" + "w" * 20, "peer-" + "p" * 20)


def write_tokens(path: Path, operator: str = OPERATOR, worker: str = WORKER, peer: str = PEER) -> Path:
    """A token file with one token for each role, put in place at once."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f'operator = ["{operator}"]\nworker = ["{worker}"]\npeer = ["{peer}"]\n')
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


class Pair(NamedTuple):
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is the PEM file that others trust."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        self._cert = builder.sign(self._key, hashes.SHA256())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        issuer_key = self._key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
        )

    def sign(self, name: str, address: str = "127.0.0.1") -> Pair:
        """A certificate for `address`, as server and as client; files of one name are replaced at once."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        cert = (
            self._builder(subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(alternative, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for path, content in ((pair.key, secret), (pair.cert, cert.public_bytes(serialization.Encoding.PEM))):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.chmod(0o600)
            fresh.replace(path)
        return pair


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    """A client's context; with a certificate of its own if given."""
    context = ssl.create_default_context(cafile=authority.ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def shown_by(url: str, authority: Authority) -> int:
    """Serial number of the certificate that the node at `url` shows."""
    with (
        open_socket(url) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        shown = tls.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def open_socket(url: str) -> socket.socket:
    """A plain connection to the port of a node on loopback."""
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)


def exchange(url: str, *parts: bytes) -> bytes:
    """Sends `parts` as they are and returns everything that comes back until the node closes."""
    with open_socket(url) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while more := sock.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


@contextmanager
def lonely_node(*options: str) -> Iterator[Node]:
    """A real node without a fleet."""
    folder = Path(tempfile.mkdtemp(prefix="wm-h-", dir="/tmp"))
    node = Node("A", folder, options, uuid.uuid4().hex).start()
    try:
        yield node
    finally:
        node.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def unharmed(node: Node) -> Iterator[httpx.Client]:
    """A client; afterwards the node must be as it was, and its log must hold no traceback."""
    before = node.view()
    node.news()
    with httpx.Client(base_url=node.url, timeout=30, trust_env=False) as client:
        yield client
        assert client.get("/v1/healthz").status_code == 200
        assert client.get("/v1/readyz").status_code == 200
    after, logged = node.view(), node.news()
    assert (after.sessions, after.standbys, after.migrations) == (before.sessions, before.standbys, 0)
    assert (after.keeper, after.executors) == (before.keeper, before.executors)
    assert after.devices == before.devices
    assert "Traceback" not in logged
    assert '"exc_type"' not in logged
