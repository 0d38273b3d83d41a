"""The settings of a node, read once from command line, environment, file and defaults.

Precedence: command line, then `WORLDMOVE_<OPTION>`, then the TOML file, then the default. A bad value
stops the start with the option, the value, where it came from and what is allowed.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldmove.errors import ConfigError
from worldmove.options import (
    DEFAULT_HTTP,
    ENV_PREFIX,
    OPTIONS,
    SOCKET_NAME,
    GateChoice,
    HttpAddress,
    LandingChoice,
    LogFormat,
    LogLevel,
    Option,
    PathChoice,
    is_loopback,
)

LOOPBACK_DEVICE = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a node can be told, validated. Docs of each option: `options.OPTIONS` and docs/options.md.

    Raises:
        ConfigError: two options contradict each other (see `_check_together`).
    """

    name: str
    ledger: str
    run_dir: Path
    http: HttpAddress = DEFAULT_HTTP
    advertise: str | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    register_rate: float = 500.0
    move_rate: float = 50.0
    gate_rate: float | None = None
    gate_outstanding: int | None = None
    gate: GateChoice = "on"
    gate_senders: int = 64
    egress_rate: float | None = None
    min_gbps: float = 0.0
    path: PathChoice = "auto"
    direct_min_gbps: float = 30.0
    direct_ring: int = 1 << 30
    direct_chunk: int = 128 << 20
    direct_depth: int = 3
    direct_landing: LandingChoice = "auto"
    lanes: int = 1
    lane_device: str = ""
    executors: int = 1
    gpus: str = "auto"
    memory_limit: int | None = None
    deadline_ms: float = 60_000.0
    peer_timeout_ms: float = 3_000.0
    stall_ms: float = 3_000.0
    max_rounds: int = 8
    live_share: float = 1.0
    faults: str = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "json"

    def __post_init__(self) -> None:
        _check_together(self)

    @property
    def socket_path(self) -> Path:
        """The Unix socket at which workers fetch their descriptors."""
        return self.run_dir / SOCKET_NAME

    @property
    def loopback(self) -> bool:
        """Whether the node can be reached from its own host only."""
        return is_loopback(self.http.host)

    @property
    def scheme(self) -> str:
        """`https` where the node serves TLS itself."""
        return "http" if self.tls_cert is None else "https"

    def url(self, port: int) -> str:
        """What other nodes and clients are told: `advertise`, or the bound address with the real port."""
        return self.advertise or f"{self.scheme}://{HttpAddress(self.http.host, port)}"


def load(
    given: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Builds the settings of a node.

    Args:
        given: options of the command line by their name in `OPTIONS`; `None` means not given.
        environ: the environment; the process's own by default.
        file: a TOML file of options at top level; `WORLDMOVE_CONFIG` by default.

    Raises:
        ConfigError: an option is unknown, missing or has a value that isn't allowed.
    """
    environment = os.environ if environ is None else environ
    if file is None and environment.get(ENV_PREFIX + "CONFIG"):
        file = Path(environment[ENV_PREFIX + "CONFIG"])
    layers = (
        ("command line", _known(given or {}, "command line")),
        ("environment", {o.name: environment[o.env] for o in OPTIONS if environment.get(o.env)}),
        (str(file), _known(_read(file), str(file)) if file else {}),
    )
    values: dict[str, Any] = {}
    for option in OPTIONS:
        for origin, layer in layers:
            if layer.get(option.name) is not None:
                values[option.name] = _parsed(option, layer[option.name], origin)
                break
    return _with_defaults(values, environment)


def check(given: Mapping[str, object]) -> None:
    """Checks options that are passed on to nodes, before one is started that would refuse them.

    Raises:
        ConfigError: as `load`, in the same words.
    """
    for name, value in _known(given, "command line").items():
        _parsed(_option(name), value, "command line")


def _with_defaults(values: dict[str, Any], environ: Mapping[str, str]) -> Settings:
    name = values.get("name")
    if name is None:
        raise ConfigError(
            f"name is missing; give --name or {ENV_PREFIX}NAME: {OPTIONS[0].allowed}", option="name"
        )
    values.setdefault("ledger", _default_ledger(environ))
    if "run_dir" not in values:
        values["run_dir"] = _parsed(_option("run_dir"), str(_runtime_folder(environ) / name), "default")
    if "lane_device" not in values and is_loopback(values.get("http", DEFAULT_HTTP).host):
        values["lane_device"] = LOOPBACK_DEVICE
    values.setdefault("executors", max(1, min(4, len(os.sched_getaffinity(0)) // 2)))
    return Settings(**values)


def _option(name: str) -> Option:
    return next(option for option in OPTIONS if option.name == name)


def _default_ledger(environ: Mapping[str, str]) -> str:
    return f"sqlite:///{_state_folder(environ) / 'ledger.db'}"


def _state_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "worldmove"


def _runtime_folder(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "worldmove" if base else Path(tempfile.gettempdir()) / f"worldmove-{os.getuid()}"


def _read(file: Path) -> dict[str, object]:
    try:
        raw = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"config {str(file)!r} cannot be read ({error}); a TOML file of options is allowed",
            option="config",
            value=str(file),
        ) from error
    return {key.replace("-", "_"): value for key, value in raw.items()}


def _known(layer: Mapping[str, object], origin: str) -> Mapping[str, object]:
    names = [option.name for option in OPTIONS]
    for key in layer:
        if key not in names:
            raise ConfigError(
                f"{key} (from {origin}) is no option; allowed: {', '.join(names)}", option=key, allowed=names
            )
    return layer


def _parsed(option: Option, value: object, origin: str) -> Any:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
            raise ValueError(value)  # noqa: TRY301, TRY004 - becomes the same ConfigError as bad text
        return option.parse(str(value))
    except ValueError as error:
        raise ConfigError(
            f"{option.name} is {value!r} (from {origin}); allowed: {option.allowed}",
            option=option.name,
            value=str(value),
            allowed=option.allowed,
        ) from error


def _check_together(settings: Settings) -> None:
    host = settings.http.host
    if not settings.loopback and settings.token_file is None:
        raise ConfigError(
            f"http is {settings.http}; without token_file only loopback is allowed, such as 127.0.0.1:8001",
            option="http",
            value=str(settings.http),
        )
    if settings.faults and not settings.loopback:
        raise ConfigError(
            f"faults is {settings.faults!r} and http is {settings.http}; faults are allowed on loopback only",
            option="faults",
            value=settings.faults,
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        missing = "tls_key" if settings.tls_key is None else "tls_cert"
        raise ConfigError(
            f"{missing} is missing; tls_cert and tls_key are allowed together only", option=missing
        )
    if settings.tls_cert is not None and settings.url(0).startswith("http:"):
        raise ConfigError(
            f"advertise is {settings.advertise!r} and the node serves TLS; an https URL is allowed",
            option="advertise",
            value=settings.advertise,
        )
    if host in ("0.0.0.0", "::") and settings.advertise is None:  # noqa: S104 - compared, not bound
        raise ConfigError(
            f"advertise is missing and http is {settings.http}; nobody can connect to that address, "
            f"so give the URL that others reach, such as {settings.scheme}://{socket.gethostname()}:{settings.http.port}",
            option="advertise",
        )


def make_state_dir(settings: Settings, *, environ: Mapping[str, str] | None = None) -> None:
    """Makes the folder of the default ledger, private to the user; one that was named has to be there.

    Raises:
        ConfigError: it can't be made.
    """
    environment = os.environ if environ is None else environ
    if settings.ledger != _default_ledger(environment):
        return
    folder = _state_folder(environment)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"ledger is {settings.ledger!r} (default), and {str(folder)!r} can't be made ({error.strerror}); "
            "give --ledger sqlite:////ABSOLUTE/PATH in a folder that is there",
            option="ledger",
            value=settings.ledger,
        ) from error


def make_run_dir(settings: Settings) -> Path:
    """Makes the folder of the node's sockets, private to the user, and returns it.

    Raises:
        ConfigError: it exists and belongs to somebody else, can be entered by others, or is no folder.
    """
    path = settings.run_dir
    allowed = "a folder of this user with mode 0700, in a folder of this user or root"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        own, above = path.lstat(), path.parent.stat()
    except OSError as error:
        raise ConfigError(
            f"run_dir is {str(path)!r} ({error.strerror}); allowed: {allowed}",
            option="run_dir",
            value=str(path),
        ) from error
    private = stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o077
    if not private or above.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"run_dir is {str(path)!r} (mode {stat.S_IMODE(own.st_mode):04o}, user {own.st_uid}); "
            f"allowed: {allowed}",
            option="run_dir",
            value=str(path),
        )
    return path
