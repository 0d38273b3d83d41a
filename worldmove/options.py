"""The table of a node's options: name, parser, what is allowed, help.

Command line, environment and file all go through these parsers, so that a value means the same, and is
refused in the same words, wherever it stands.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from worldmove.quantities import parse_rate, parse_size

ENV_PREFIX = "WORLDMOVE_"
MAX_SOCKET_PATH = 107
"""Longest path that the kernel takes for a Unix socket, in bytes (sun_path less its final zero)."""
SOCKET_NAME = "node.sock"

PathChoice = Literal["auto", "local", "direct", "staged"]
LandingChoice = Literal["auto", "ring", "straight"]
GateChoice = Literal["on", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]

_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class HttpAddress(NamedTuple):
    """Where the node listens; port 0 lets the kernel choose, and the chosen one is advertised."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


DEFAULT_HTTP = HttpAddress("127.0.0.1", 8001)


class Option(NamedTuple):
    """One row of the table: `parse` turns text into the value, or raises ValueError."""

    name: str
    parse: Callable[[str], Any]
    allowed: str
    help: str

    @property
    def flag(self) -> str:
        """As it stands on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """As it stands in the environment."""
        return ENV_PREFIX + self.name.upper()


def _ring(text: str) -> int:
    if not 512 << 20 <= (size := parse_size(text)) <= 4 << 30:
        raise ValueError(text)
    return size


def _chunk(text: str) -> int:
    if not 16 << 20 <= (size := parse_size(text)) <= 256 << 20:
        raise ValueError(text)
    return size


def is_loopback(host: str) -> bool:
    """Whether `host` is this host's loopback: an address of it, or the name `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError(text)
    return text


def _http(text: str) -> HttpAddress:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare and host == bare) or not port.isdecimal() or int(port) > 65535:
        raise ValueError(text)
    return HttpAddress(bare, int(port))


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError(text)
    if parts.username or parts.query or parts.fragment:
        raise ValueError(text)
    return text.rstrip("/")


def _ledger(text: str) -> str:
    parts = urlsplit(text)
    sqlite = parts.scheme == "sqlite" and not parts.netloc and len(parts.path) > 1
    if not sqlite and not (parts.scheme == "etcd" and parts.hostname):
        raise ValueError(text)
    return text


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        # `~name` of a user that doesn't exist.
        raise ValueError(text) from error


def _directory(text: str) -> Path:
    path = _path(text)
    if not text or len(os.fsencode(path / SOCKET_NAME)) > MAX_SOCKET_PATH:
        raise ValueError(text)
    return path


def _file(text: str) -> Path:
    path = _path(text)
    if not path.is_file():
        raise ValueError(text)
    return path


def _device(text: str) -> str:
    if text == "all":
        return ""
    if not re.fullmatch(r"[!-.0-~]{1,15}", text) or text in (".", ".."):
        raise ValueError(text)
    return text


def _gpus(text: str) -> str:
    if text in ("auto", "none"):
        return text
    uuids = [each.strip() for each in text.split(",")]
    if len(set(uuids)) != len(uuids) or not all(_UUID.fullmatch(each) for each in uuids):
        raise ValueError(text)
    return ",".join(uuids)


def _faults(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9,:=.@-]{0,256}", text):
        raise ValueError(text)
    return text


_MS = "milliseconds, 1 to 86400000"
OPTIONS: tuple[Option, ...] = (
    Option(
        "name",
        _name,
        "1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit",
        "Stable name of this node. Required.",
    ),
    Option(
        "http",
        _http,
        "HOST:PORT or [IPv6]:PORT",
        "Where REST and peers are served; port 0: the kernel picks.",
    ),
    Option(
        "advertise",
        _url,
        "http(s)://HOST[:PORT] without a path",
        "URL under which other nodes reach this one. Default: the bound address.",
    ),
    Option(
        "ledger",
        _ledger,
        "sqlite:///RELATIVE, sqlite:////ABSOLUTE or etcd://HOST:PORT",
        "The record of who owns which session; nodes of one fleet share it. "
        "Default: worldmove/ledger.db in the user's state folder.",
    ),
    Option(
        "run_dir",
        _directory,
        f"a folder whose path and /{SOCKET_NAME} together have at most {MAX_SOCKET_PATH} bytes",
        "Folder (mode 0700) of the Unix sockets. Default: worldmove/NAME in $XDG_RUNTIME_DIR, "
        "else worldmove-UID/NAME in the folder for temporary files.",
    ),
    Option(
        "token_file",
        _file,
        "a TOML file with lists of tokens under operator, worker and peer",
        "Bearer tokens by role, read again when it changes. Without it only loopback is served.",
    ),
    Option(
        "tls_cert",
        _file,
        "a PEM file with the node's certificate and its intermediates",
        "Serves https (and wss for peers) with this certificate. Read again when it changes.",
    ),
    Option(
        "tls_key",
        _file,
        "the PEM file of tls_cert's private key, closed to others, without a passphrase",
        "Private key of the certificate.",
    ),
    Option(
        "tls_ca",
        _file,
        "a PEM file of CA certificates",
        "Authorities of peers: they must show a certificate of one (mutual TLS), and only such nodes are "
        "called. Default: the system's authorities, and peers are known by their token alone.",
    ),
    Option(
        "register_rate",
        _number(0, 1_000_000),
        "registrations a second, 0 to 1000000",
        "What one client (role and address) may register, sessions and standbys together. 0: no limit.",
    ),
    Option(
        "move_rate",
        _number(0, 1_000_000),
        "requests a second, 0 to 1000000",
        "How many moves one client (role and address) may ask for. 0: no limit.",
    ),
    Option(
        "gate",
        _one_of(get_args(GateChoice)),
        "on or off",
        "off: all who ask are granted at once, and no move is turned away: to measure what it prevents.",
    ),
    Option(
        "gate_rate",
        parse_rate,
        "a rate such as 10Gbit or 500Mbit",
        "Bytes this node lets in for all moves together. Default: no limit.",
    ),
    Option(
        "gate_outstanding",
        parse_size,
        "a size such as 4MiB, 64MB or 1048576",
        "Most bytes granted to senders and not landed yet; less, where measuring finds that less is enough. "
        "Default: 1 GiB.",
    ),
    Option(
        "gate_senders",
        _integer(1, 64),
        "1 to 64",
        "Most senders that answer at once; fewer, where measuring finds that fewer bring as much.",
    ),
    Option(
        "egress_rate",
        parse_rate,
        "a rate such as 10Gbit or 500Mbit",
        "Bytes this node sends over lanes for all its outbound moves together. Default: no limit.",
    ),
    Option(
        "min_gbps",
        _number(0, 100_000),
        "Gbit/s, 0 to 100000",
        "A path that measures slower is refused instead of being slow without a word. 0: no floor.",
    ),
    Option(
        "path",
        _one_of(get_args(PathChoice)),
        "auto, local, direct or staged",
        "How bytes travel: local (on one host), direct (GPU to GPU by UCX), staged (TCP), or what is best.",
    ),
    Option(
        "direct_min_gbps",
        _number(0, 100_000),
        "Gbit/s, 0 to 100000",
        "What a bare transfer between direct lanes must bring, or the path is not taken.",
    ),
    Option("direct_ring", _ring, "a size of 512MiB to 4GiB", "What a direct lane takes of its GPU."),
    Option("direct_chunk", _chunk, "a size of 16MiB to 256MiB", "The longest message of direct lanes."),
    Option("direct_depth", _integer(1, 16), "1 to 16", "Messages that a direct lane has under way at once."),
    Option(
        "direct_landing",
        _one_of(get_args(LandingChoice)),
        "auto, ring or straight",
        "Where direct lanes receive long messages: in their ring, in the session's memory, or as is faster.",
    ),
    Option(
        "lane_device",
        _device,
        "a network device such as wg0, 1 to 15 characters, or all",
        "The only network device through which lanes are reached. Default: lo where http is on loopback, "
        "else all.",
    ),
    Option("lanes", _integer(1, 16), "1 to 16", "Data-plane processes per move."),
    Option(
        "executors",
        _integer(1, 64),
        "1 to 64",
        "Processes that digest and copy host memory. Default: half the cores, 1 to 4.",
    ),
    Option(
        "gpus",
        _gpus,
        "auto, none, or UUIDs of GPUs such as GPU-… or MIG-…, separated by commas",
        "The GPUs whose memory sessions may lie in, each with an executor of its own. Default: all.",
    ),
    Option(
        "memory_limit",
        parse_size,
        "a size such as 4GB, 4GiB or 4096",
        "Most bytes that arenas of this node hold together. Default: what the machine has.",
    ),
    Option(
        "deadline_ms",
        _number(1, 86_400_000),
        _MS,
        "Deadline of a move that names none, from request to commit.",
    ),
    Option(
        "peer_timeout_ms", _number(1, 86_400_000), _MS, "How long the other node may stay silent in a move."
    ),
    Option(
        "stall_ms",
        _number(1, 86_400_000),
        _MS,
        "How long a lane may carry no byte, or an executor answer nothing, while it should.",
    ),
    Option(
        "max_rounds", _integer(1, 64), "1 to 64", "Most rounds of live copying before the world is paused."
    ),
    Option(
        "live_share",
        _number(0.01, 1),
        "0.01 to 1",
        "Share of the time in which a live round may bring bytes or digest; the rest is the world's alone.",
    ),
    Option(
        "faults",
        _faults,
        "a comma list of fault names",
        "For tests: makes the named things go wrong. Refused on anything but loopback.",
    ),
    Option("log_level", _one_of(get_args(LogLevel)), "debug, info, warning or error", "Least level logged."),
    Option("log_format", _one_of(get_args(LogFormat)), "json or console", "Shape of the log on stderr."),
)
