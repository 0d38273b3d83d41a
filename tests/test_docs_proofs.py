"""The map from promises to tests names tests that exist, for every promise."""

from __future__ import annotations

import ast
import re

import pytest
from structure_kit import ROOT

PAGE = (ROOT / "docs/faults.md").read_text().partition("## What proves it")[2]
NAMED = sorted(set(re.findall(r"`(\w+)::(\w+|\*)`", PAGE)))


@pytest.mark.parametrize("named", NAMED, ids="::".join)
def test_a_named_test_exists(named: tuple[str, str]) -> None:
    file, name = named
    tree = ast.parse((ROOT / f"tests/test_{file}.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    tests = {one.name.removeprefix("test_") for one in functions if one.name.startswith("test_")}
    assert tests if name == "*" else name in tests


def test_every_number_has_its_proof() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[1]) for row in rows] == list(range(1, 13))
    assert all("::" in row[3] + row[4] for row in rows)
