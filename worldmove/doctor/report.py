"""Runs the checks and shows what they found."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from worldmove.doctor.finding import Finding, ok
from worldmove.doctor.gpu import GPU_CHECKS, Machine, look
from worldmove.doctor.table import CHECKS, Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found; `ok` unless a check failed."""

    ok: bool
    checks: tuple[Finding, ...]


def examine(checks: Sequence[Check] = CHECKS, gpus: Machine | None = None) -> Report:
    """Runs the checks one after another, and those of GPUs where there are any."""
    findings = [check() for check in checks]
    if gpus is None:
        findings.append(ok("GPU", "none: sessions live in host memory"))
    else:
        findings += [check(gpus) for check in GPU_CHECKS]
    return Report(ok=all(finding.status != "fail" for finding in findings), checks=tuple(findings))


def run(json: bool = False) -> int:
    """Examines this machine and shows the report on stdout, as a table or as one JSON document.

    Returns:
        The exit code: 0 unless a check failed.
    """
    report = examine(gpus=look())
    if json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(report)
    return 0 if report.ok else 1


def _show(report: Report) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found"):
        table.add_column(column)
    for finding in report.checks:
        colour = _COLOURS[finding.status]
        advice = f"\n[{colour}]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(f"[{colour}]{finding.status}[/]", finding.name, escape(finding.found) + advice)
    console = Console()
    console.print(table)
    console.print("A node can run here." if report.ok else "A node can't run here: see what failed above.")
