"""On which devices the regions of a session lie, and may lie elsewhere: two manifests compared; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from worldmove.manifest import HOST, Manifest, Source

ANYWHERE: Mapping[str, str] = {}


class Wanted(NamedTuple):
    """Where the regions of a session are to lie after a move.

    Attributes:
        devices: by the device on which they lie now; those of other devices may lie on any of their kind.
        elsewhere: at least one region has to change its device, since the node is the same.
    """

    devices: Mapping[str, str] = ANYWHERE
    elsewhere: bool = False


def differences(mine: Manifest, theirs: Manifest, devices: Mapping[str, str] = ANYWHERE) -> list[str]:
    """Names the fields in which two manifests differ in a way that forbids a move; empty where they match.

    Args:
        mine: of the session.
        theirs: of the memory that it would go to.
        devices: as of `Wanted`.
    """
    fields = [name for name in ("model", "host_state_bytes") if getattr(mine, name) != getattr(theirs, name)]
    ours = {region.name: region for region in mine.regions}
    others = {region.name: region for region in theirs.regions}
    fields += [f"regions.{name}" for name in sorted(ours.keys() ^ others.keys())]
    if [r.name for r in mine.regions] != [r.name for r in theirs.regions] and not fields:
        fields.append("regions.order")
    for name in ours.keys() & others.keys():
        fields += [
            f"regions.{name}.{key}"
            for key in ("dtype", "shape", "rank", "stride_bytes")
            if getattr(ours[name], key) != getattr(others[name], key)
        ]
        here, there = ours[name].device, others[name].device
        if (here == HOST) != (there == HOST) or devices.get(here, there) != there:
            fields.append(f"regions.{name}.device")
    return sorted(fields)


def changes(mine: Manifest, theirs: Manifest) -> bool:
    """Whether any region that both have lies on another device there, or any is not there at all."""
    there = {region.name: region.device for region in theirs.regions}
    return any(there.get(region.name) != region.device for region in mine.regions)


def placed(manifest: Manifest, devices: Mapping[str, str] = ANYWHERE) -> Manifest:
    """The same regions in arenas of a node, on the devices that `devices` names, else where they were."""
    regions = tuple(
        replace(region, device=devices.get(region.device, region.device), source=Source())
        for region in manifest.regions
    )
    return replace(manifest, regions=regions)


def travelled(mine: Manifest, theirs: Manifest) -> tuple[tuple[str, str], ...]:
    """From which GPU to which regions go: each pair once, in the regions' order."""
    there = {region.name: region.device for region in theirs.regions}
    pairs = ((region.device, there.get(region.name, "")) for region in mine.regions if region.device != HOST)
    return tuple(dict.fromkeys(pairs))
