"""What can't be asked for in a move, whatever the state of the nodes."""

from __future__ import annotations

import math

from worldmove import messages as m
from worldmove.errors import ManifestError, ValidationError, WorldMoveError
from worldmove.manifest import validate


def impossible(hello: m.Hello) -> m.Rejected | None:
    """The refusal of regions that can't be: such a move could be neither shown nor counted."""
    try:
        validate(hello.manifest)
    except ManifestError as error:
        return rejected(error)
    return None


def rejected(error: WorldMoveError) -> m.Rejected:
    """An error as the destination's answer."""
    return m.Rejected(code=error.code, message=error.message[: m.MAX_TEXT], details=error.details)


def check_devices(devices: dict[str, str]) -> None:
    """Checks the devices that a request names.

    Raises:
        ValidationError: this node has no such device.
    """
    for source, destination in devices.items():
        for device in (source, destination):
            if device != "host":
                raise ValidationError(
                    f"devices names {device!r}; this node has 'host' only", field="devices", value=device
                )


def positive(field: str, given: float | None, default: float) -> float:
    """A time of a request, or the default.

    Raises:
        ValidationError: it is no finite number above 0.
    """
    value = default if given is None else given
    if not (math.isfinite(value) and value > 0):
        raise ValidationError(f"{field} is {value}; a finite number above 0 is allowed", field=field)
    return value
