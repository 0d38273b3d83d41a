"""Options: four sources in order, every parser, what contradicts, the folder of sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmove.config import load, make_run_dir, make_state_dir
from worldmove.errors import ConfigError
from worldmove.options import OPTIONS, HttpAddress, is_loopback, parse_rate, parse_size

NAME = {"name": "A"}


def test_defaults_need_only_a_name() -> None:
    settings = load(NAME, environ={"XDG_RUNTIME_DIR": "/run/u", "XDG_STATE_HOME": "/var/s"})
    assert str(settings.http) == "127.0.0.1:8001"
    assert settings.run_dir == Path("/run/u/worldmove/A")
    assert settings.ledger == "sqlite:////var/s/worldmove/ledger.db"
    assert settings.socket_path.name == "node.sock"
    assert 1 <= settings.executors <= 4
    assert settings.loopback


def test_the_folder_of_the_default_ledger_is_made_and_no_other(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    make_state_dir(
        load(NAME | {"ledger": f"sqlite:///{tmp_path}/named/ledger.db"}, environ=environ), environ=environ
    )
    assert not list(tmp_path.iterdir())
    make_state_dir(load(NAME, environ=environ), environ=environ)
    assert (tmp_path / "state" / "worldmove").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    environ = {"XDG_STATE_HOME": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match=r"ledger is .* can't be made \(Not a directory\)"):
        make_state_dir(load(NAME, environ=environ), environ=environ)


def test_without_a_runtime_folder_the_users_own_is_used() -> None:
    assert load(NAME, environ={}).run_dir.parent.name == f"worldmove-{os.getuid()}"


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('name = "F"\nlanes = 2\nmax-rounds = 9\ndeadline_ms = 1.5\n')
    environ = {"WORLDMOVE_LANES": "3", "WORLDMOVE_MAX_ROUNDS": "8", "WORLDMOVE_CONFIG": str(file)}
    settings = load({"lanes": "4", "name": None}, environ=environ)
    assert (settings.name, settings.lanes, settings.max_rounds, settings.deadline_ms) == ("F", 4, 8, 1.5)
    assert load(NAME, environ={"WORLDMOVE_LANES": ""}).lanes == 1


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("10Gbit", 1.25e9), ("500 Mbit/s", 62.5e6), ("1.5gbit", 187.5e6), ("8bit", 1.0), ("1Tbit", 1.25e11)],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GB", 4 * 10**9), ("4GiB", 4 * 2**30), ("4096", 4096), ("1.5 MiB", 1572864), ("7b", 7), ("2kB", 2000)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(1, 2**62))
def test_a_plain_number_of_bytes_is_exact(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes


@given(st.text(max_size=20))
def test_parsers_accept_or_raise_value_errors(text: str) -> None:
    for option in OPTIONS:
        try:
            option.parse(text)
        except ValueError:
            continue


BAD = [
    ("name", "-a"),
    ("name", "a" * 64),
    ("http", "8001"),
    ("http", ":8001"),
    ("http", "::1:80"),
    ("http", "h:65536"),
    ("http", "h:x"),
    ("advertise", "ftp://h"),
    ("advertise", "http://h/path"),
    ("advertise", "http://user@h"),
    ("ledger", "sqlite://db"),
    ("ledger", "sqlite:///"),
    ("ledger", "mysql://h/db"),
    ("ledger", "etcd://"),
    ("run_dir", "/" + "x" * 100),
    ("token_file", "/nowhere/tokens"),
    ("gate_rate", "10"),
    ("tls_cert", "no-such-file"),
    ("tls_key", "no-such-file"),
    ("tls_ca", "no-such-file"),
    ("register_rate", "-1"),
    ("register_rate", "nan"),
    ("move_rate", "1/s"),
    ("gate_rate", "0Gbit"),
    ("gate_outstanding", "0MB"),
    ("gate_outstanding", "4Mbit"),
    ("gate", "maybe"),
    ("gate_senders", "0"),
    ("gate_senders", "65"),
    ("egress_rate", "10GB"),
    ("gate_rate", "10GB"),
    ("min_gbps", "-1"),
    ("min_gbps", "nan"),
    ("path", "fast"),
    ("direct_min_gbps", "-1"),
    ("direct_ring", "256MiB"),
    ("direct_ring", "5GiB"),
    ("direct_chunk", "8MiB"),
    ("direct_chunk", "512MiB"),
    ("direct_depth", "0"),
    ("direct_landing", "here"),
    ("lane_device", "a/b"),
    ("lane_device", "x" * 16),
    ("lanes", "0"),
    ("lanes", "1.5"),
    ("executors", "65"),
    ("memory_limit", "0"),
    ("memory_limit", "4 parsecs"),
    ("deadline_ms", "0"),
    ("deadline_ms", "inf"),
    ("peer_timeout_ms", "x"),
    ("stall_ms", ""),
    ("max_rounds", "0"),
    ("live_share", "0"),
    ("faults", "rm -rf"),
    ("gpus", "cuda:0"),
    ("log_level", "loud"),
    ("log_format", "xml"),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_a_bad_value_names_option_value_origin_and_what_is_allowed(option: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(NAME | {option: value}, environ={})
    allowed = next(row.allowed for row in OPTIONS if row.name == option)
    message = str(caught.value)
    assert option in message
    assert repr(value) in message
    assert "command line" in message
    assert allowed in message


def test_every_option_has_a_bad_value_here() -> None:
    assert {option for option, _ in BAD} == {option.name for option in OPTIONS}


def test_a_bad_value_of_the_environment_says_so() -> None:
    with pytest.raises(ConfigError, match="environment"):
        load(NAME, environ={"WORLDMOVE_LANES": "many"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("lames = 2", "lames"),
        ("lanes = true", "lanes"),
        ("lanes = [1]", "lanes"),
        ("lanes", "TOML"),
        ("[serve]\nlanes = 1", "serve"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        load(NAME, environ={}, file=file)


def test_a_missing_file_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config"):
        load(NAME, environ={}, file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="name is missing"):
        load({}, environ={})


def test_only_loopback_without_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("")
    with pytest.raises(ConfigError, match="token_file"):
        load(NAME | {"http": "192.0.2.1:80"}, environ={})
    guarded = NAME | {"http": "192.0.2.1:80", "token_file": str(tokens)}
    assert not load(guarded, environ={}).loopback
    with pytest.raises(ConfigError, match="faults are allowed on loopback only"):
        load(guarded | {"faults": "lane-stall"}, environ={})
    with pytest.raises(ConfigError, match="advertise"):
        load(guarded | {"http": "0.0.0.0:80"}, environ={})
    everywhere = load(guarded | {"http": "[::]:80", "advertise": "https://a.example/"}, environ={})
    assert everywhere.url(81) == "https://a.example"


def test_addresses() -> None:
    assert str(HttpAddress("::1", 5)) == "[::1]:5"
    assert load(NAME | {"http": "[::1]:0"}, environ={}).url(7) == "http://[::1]:7"
    assert [is_loopback(h) for h in ("127.9.9.9", "::1", "localhost")] == [True] * 3
    assert [is_loopback(h) for h in ("10.0.0.1", "localhost.evil", "", "0.0.0.0")] == [False] * 4


def test_the_run_folder_is_private(run_dir: Path) -> None:
    settings = load(NAME | {"run_dir": run_dir / "new" / "A"}, environ={})
    assert make_run_dir(settings).stat().st_mode & 0o777 == 0o700
    make_run_dir(settings)
    settings.run_dir.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0750"):
        make_run_dir(settings)


def test_a_run_folder_that_is_a_link_or_a_file_is_refused(run_dir: Path) -> None:
    real = run_dir / "real"
    real.mkdir(mode=0o700)
    (run_dir / "link").symlink_to(real)
    (run_dir / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="run_dir"):
            make_run_dir(load(NAME | {"run_dir": run_dir / name}, environ={}))
