"""Tokens by role: the file's form, rotation, and that nothing shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldmove.errors import ConfigError
from worldmove.tokens import MAX_TOKENS, TokenFile

OLD, NEW, PEER = "old-" + "o" * 20, "new-" + "n" * 20, "peer-" + "p" * 20


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_roles_of_a_token(tmp_path: Path) -> None:
    file = write(tmp_path / "t", f'operator = ["{OLD}"]\nworker = ["{OLD}"]\npeer = ["{PEER}"]\n')
    tokens = TokenFile(file).current()
    assert tokens.roles(OLD) == {"operator", "worker"}
    assert tokens.roles(PEER) == {"peer"}
    near = (PEER[:-1], PEER[1:], PEER + "x", PEER + PEER, f" {PEER}", f"{PEER}\n", f"{PEER}\0", PEER.upper())
    for wrong in (*near, "", "p", "ü\udcff", OLD + PEER):
        assert tokens.roles(wrong) == frozenset(), wrong
    assert tokens.first("peer") == PEER
    assert OLD not in repr(tokens)


def test_rotation_needs_no_restart_and_survives_a_bad_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t", f'operator = ["{OLD}"]\n')
    file = TokenFile(path)
    write(tmp_path / "n", f'operator = ["{NEW}", "{OLD}"]\n').replace(path)
    assert file.current().roles(NEW) == {"operator"}
    assert file.current().roles(OLD) == {"operator"}
    write(path, "operator = broken")
    assert file.current().roles(NEW) == {"operator"}
    path.unlink()
    assert file.current().roles(NEW) == {"operator"}
    write(path, f'operator = ["{NEW}"]\n')
    assert file.current().roles(OLD) == frozenset()
    assert file.current().first("peer") is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (f'operator = ["{OLD}"]\n', 0o640),
        (f"operator = [{OLD}]\n", 0o600),
        (f'operator = "{OLD}"\n', 0o600),
        ('operator = ["short"]\n', 0o600),
        (f'operator = ["{OLD} {OLD}"]\n', 0o600),
        ("operator = [1234567890123456789]\n", 0o600),
        (f'operator = ["{"x" * 513}"]\n', 0o600),
        (f'operator = ["{"ü" * 20}"]\n', 0o600),
        (f'operator = ["{"x" * 20}\\u0007"]\n', 0o600),
        ("operator = 5\n", 0o600),
        ("operator = {}\n", 0o600),
        (f"operator = {[f'{number:020}' for number in range(MAX_TOKENS + 1)]}\n", 0o600),
    ],
)
def test_a_wrong_file_is_refused_and_not_quoted(tmp_path: Path, text: str, mode: int) -> None:
    path = write(tmp_path / "t", text, mode)
    with pytest.raises(ConfigError) as caught:
        TokenFile(path)
    assert "token_file" in str(caught.value)
    assert OLD not in str(caught.value)


def test_unknown_roles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admin"):
        TokenFile(write(tmp_path / "t", "admin = []\n"))
