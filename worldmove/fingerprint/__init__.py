"""All that must be equal on two hosts for them to generate the same bits.

A flat mapping of names to strings, so that any stack can add what it knows and a mismatch can name the
differing fields. Nothing of a host's identity is part of it: not its name, its kernel, its clock, nor which
GPU it is.
"""

from worldmove.fingerprint.fields import MAX_FIELDS, MAX_LENGTH, check, collect, differences
from worldmove.fingerprint.host import cpu_fields
from worldmove.fingerprint.stack import stack_fields

__all__ = ["MAX_FIELDS", "MAX_LENGTH", "check", "collect", "cpu_fields", "differences", "stack_fields"]
