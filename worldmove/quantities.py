"""Rates and sizes as people write them, with units."""

from __future__ import annotations

import math
import re

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)(/s)?")


def parse_rate(text: str) -> float:
    """Bytes per second of a line rate: `10Gbit`, `500 Mbit/s` (powers of 1000, as networks count).

    Raises:
        ValueError: no number, no unit, or 0.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BITS:
        raise ValueError(text)
    return _positive(float(match[1]) * _BITS[match[2].lower()] / 8)


def parse_size(text: str) -> int:
    """Bytes of `4GB` (powers of 1000), `4GiB` (powers of 1024) or `4096`.

    Raises:
        ValueError: no number, an unknown unit, or less than one byte.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[3] or match[2].lower() not in _BYTES:
        raise ValueError(text)
    whole = int(float(match[1]) * _BYTES[match[2].lower()]) if "." in match[1] else None
    return int(_positive(int(match[1]) * _BYTES[match[2].lower()] if whole is None else whole))


def _positive(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(value)
    return value
