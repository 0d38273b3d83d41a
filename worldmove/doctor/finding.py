"""What a check answers."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a check.

    Attributes:
        name: what was looked at.
        status: `ok`; `warn`: it works, but less well, or not everything does; `fail`: a node would not run.
        found: what is there, in words and figures.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name=name, status="ok", found=found)


def warn(name: str, found: str, advice: str) -> Finding:
    """It works, but less well."""
    return Finding(name=name, status="warn", found=found, advice=advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """A node would not run."""
    return Finding(name=name, status="fail", found=found, advice=advice)
