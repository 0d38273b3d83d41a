"""The whole fingerprint: host, GPUs, libraries, torch, and what the stack says; its bounds; comparing two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worldmove.errors import ValidationError
from worldmove.fingerprint.gpu import gpu_fields
from worldmove.fingerprint.host import host_fields
from worldmove.fingerprint.libraries import library_fields
from worldmove.fingerprint.torch_fields import torch_fields

MAX_FIELDS = 256
MAX_LENGTH = 512


def collect(
    extra: Mapping[str, str] | None = None,
    *,
    model: str,
    weights_digest: str | None = None,
    devices: Sequence[str] = (),
) -> dict[str, str]:
    """The fingerprint of this process on this host.

    What is loaded now is asked: import what the world computes with first, and set its flags. PyTorch's
    fields are part of it if the process has imported it; it is not imported for them.

    Args:
        extra: what the serving stack adds, for instance `stack_fields`; its names must not be taken.
        model: name of the model, as in the manifest.
        weights_digest: digest of the weights that are loaded, in the stack's own notation.
        devices: UUIDs of the GPUs on which the world lives, in its order; none for a world in host memory.

    Raises:
        ValidationError: `extra` has a name that is taken, too many fields, or a field too long.
        DeviceError: CUDA's driver can't be asked about `devices`.
    """
    fields = {"model": model, **host_fields(), **torch_fields()}
    if devices:
        fields |= gpu_fields(devices) | library_fields()
    if weights_digest is not None:
        fields["weights"] = weights_digest
    added = dict(extra or {})
    taken = sorted(fields.keys() & added.keys())
    if taken:
        raise ValidationError(
            f"fingerprint fields {taken} are taken; choose other names", field="fingerprint"
        )
    fields |= added
    check(fields)
    return fields


def check(fields: Mapping[str, str]) -> None:
    """Bounds a fingerprint, wherever it comes from.

    Raises:
        ValidationError: more than `MAX_FIELDS` fields, or a name or value over `MAX_LENGTH` characters.
    """
    if len(fields) > MAX_FIELDS:
        raise ValidationError(
            f"fingerprint has {len(fields)} fields; at most {MAX_FIELDS} are allowed", field="fingerprint"
        )
    for name, value in fields.items():
        if not 1 <= len(name) <= MAX_LENGTH or len(value) > MAX_LENGTH:
            raise ValidationError(
                f"fingerprint field {name[:64]!r} is empty or longer than {MAX_LENGTH} characters",
                field=f"fingerprint.{name[:64]}",
            )


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the fields that differ or stand on one side only, sorted; empty where the hosts match."""
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
