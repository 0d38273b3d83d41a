"""What can't be asked for in a move, whatever the state of the nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from worldmove import messages as m
from worldmove.errors import ManifestError, SamePlaceError, ValidationError, WorldMoveError
from worldmove.manifest import HOST, Manifest, validate
from worldmove.views import DryRun


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


def refused(error: WorldMoveError, required: dict[str, float]) -> DryRun:
    """A rejection as the verdict of a dry run; `required` is known here, the rest tells the destination."""
    details = error.details
    wait, condition = details.get("retry_after_ms"), details.get("condition")
    return DryRun(
        admissible=False,
        code=error.code,
        condition=condition if isinstance(condition, str) else None,
        reason=error.message,
        required=required | error.numbers("required"),
        available=error.numbers("available"),
        unmeasured=tuple(filter(lambda one: isinstance(one, str), details.get("unmeasured") or ())),
        retry_after_ms=float(wait) if isinstance(wait, int | float) else None,
    )


def device_map(asked: Mapping[str, str], manifest: Manifest, named: Callable[[str], str]) -> dict[str, str]:
    """The devices of a request: those of the source by UUID, those of the destination as they were named.

    Args:
        asked: as the request has it.
        manifest: of the session.
        named: the UUID of a device of the source's node, which raises `ValidationError` where it has none.

    Raises:
        ValidationError: a device is not there, has no region of the session, or stands twice; or host memory
            is to become a GPU's, or the other way round.
    """
    there = sorted({region.device for region in manifest.regions})
    found: dict[str, str] = {}
    for source, destination in asked.items():
        device = named(source)
        if device not in there or device in found:
            raise ValidationError(
                f"devices names {source!r}; allowed, once each: devices of the session's regions, {there}",
                field="devices",
                value=source,
            )
        if (device == HOST) != (destination == HOST):
            raise ValidationError(
                f"devices has {source!r} to {destination!r}; host memory stays so, and so does a GPU's",
                field="devices",
                value=destination,
            )
        found[device] = destination
    return found


def check_elsewhere(session_id: str, node: str, manifest: Manifest, devices: Mapping[str, str]) -> None:
    """Checks a move that stays on its node: some region may change its device.

    Args:
        session_id: of the session.
        node: where it is.
        manifest: of the session.
        devices: by UUID at both ends.

    Raises:
        SamePlaceError: none does.
    """
    if all(devices.get(device) == device for device in manifest.gpus):
        raise SamePlaceError(
            f"session {session_id!r} is on {node} already; allowed: another node, or, for regions on GPUs, "
            "another GPU of this one"
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
