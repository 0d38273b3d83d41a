"""Memory that a serving stack allocated itself: opened by name (`shm`), or by handle (`cuda-ipc`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from worldmove.cuda.ipc import decode, make_card, pid_namespace
from worldmove.errors import ManifestError, ValidationError
from worldmove.hosting.shared import open_shared
from worldmove.ipc import close_all
from worldmove.manifest import Extent, Manifest, Place, Region

Check = Callable[[str, int, int], Awaitable[None]]
"""Whether a device (by UUID) can map a descriptor of so many bytes; raises `ValidationError` if not."""


class Foreign(NamedTuple):
    """What was opened: an extent for each object and rank, counting on from those that the node allocates.

    Attributes:
        fds: of the extents; of a handle, its card (`worldmove.cuda.ipc`).
        places: by the region's number.
        fields: for each extent, what names it in the request.
    """

    extents: list[Extent]
    fds: list[int]
    places: dict[int, Place]
    fields: list[str]


def open_foreign(manifest: Manifest, first: int) -> Foreign:
    """Opens what the regions name.

    Args:
        manifest: validated.
        first: index of the first extent.

    Raises:
        ManifestError: an object is not there, or too small for a region; or a handle is of another PID
            namespace, or none.
    """
    found = Foreign([], [], {}, [])
    index: dict[tuple[int, str, str], int] = {}
    try:
        for number, region in enumerate(manifest.regions):
            if region.source.kind == "shm":
                _take_shared(number, region, found, index, first)
            elif region.source.kind == "cuda-ipc":
                _take_handle(number, region, found, index, first)
    except BaseException:
        close_all(found.fds)
        raise
    return found


async def check_handles(foreign: Foreign, check: Check) -> None:
    """Has every device open the handles of its memory, once.

    Raises:
        ManifestError: it can't; the region's handle is named.
    """
    for extent, fd, field in zip(foreign.extents, foreign.fds, foreign.fields, strict=True):
        if not field.endswith(".handle"):
            continue
        try:
            await check(extent.device, fd, extent.nbytes)
        except ManifestError:
            raise
        except ValidationError as error:
            raise ManifestError(f"{field} can't be opened: {error.message}", field=field) from error


def _take_shared(
    number: int, region: Region, found: Foreign, index: dict[tuple[int, str, str], int], first: int
) -> None:
    name, field = region.source.name or "", f"regions[{number}].source.name"
    needed = max(region.source.offset + region.nbytes, 1)
    key = (region.rank, region.device, name.removeprefix("/"))
    if key not in index:
        fd, size = open_shared(name, needed, field)
        found.fds.append(fd)
        index[key] = len(found.extents)
        found.extents.append(Extent(region.rank, region.device, size))
        found.fields.append(field)
    size = found.extents[index[key]].nbytes
    if size < needed:
        raise ManifestError(
            f"regions[{number}] ends at byte {needed} of {name!r}, which has {size}",
            field=f"regions[{number}].source.offset",
        )
    found.places[number] = Place(first + index[key], region.source.offset)


def _take_handle(
    number: int, region: Region, found: Foreign, index: dict[tuple[int, str, str], int], first: int
) -> None:
    source, where = region.source, f"regions[{number}].source"
    mine = pid_namespace()
    if source.pid_namespace != mine:
        raise ManifestError(
            f"{where}.pid_namespace is {source.pid_namespace}, this node's is {mine}: handles of CUDA can be "
            "opened within one PID namespace only (share it, as by --pid); allowed elsewhere: 'arena'",
            field=f"{where}.pid_namespace",
        )
    handle = source.handle or ""
    key = (region.rank, region.device, handle)
    needed = max(source.offset + region.nbytes, 1)
    if key not in index:
        try:
            found.fds.append(make_card(decode(handle)))
        except ValueError as error:
            raise ManifestError(
                f"{where}.handle is no handle of CUDA: {error}", field=f"{where}.handle"
            ) from error
        index[key] = len(found.extents)
        found.extents.append(Extent(region.rank, region.device, needed))
        found.fields.append(f"{where}.handle")
    at = index[key]
    if found.extents[at].nbytes < needed:
        found.extents[at] = Extent(region.rank, region.device, needed)
    found.places[number] = Place(first + at, source.offset)
