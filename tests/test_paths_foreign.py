"""What a source says of its memory, checked before anything of it is mapped."""

from __future__ import annotations

import pytest
from inbound_kit import manifest

from worldmove.errors import FramingError
from worldmove.manifest import Place, layout
from worldmove.messages import Begin
from worldmove.paths import foreign_memory

MANIFEST = manifest()
(EXTENT,), PLACES = layout(MANIFEST.regions)
LAST = PLACES[-1]


def begin(
    places: tuple[Place, ...] = tuple(PLACES),
    sizes: tuple[int, ...] = (EXTENT.nbytes,),
    devices: tuple[str, ...] = (),
) -> Begin:
    return Begin(socket="/s", token=b"t" * 32, extent_bytes=sizes, extent_devices=devices, places=places)


def test_memory_as_it_is_laid_out_is_taken() -> None:
    holding = foreign_memory(MANIFEST, begin(), [7])
    assert holding.places == tuple(PLACES)
    assert [(extent.device, extent.nbytes) for extent in holding.extents] == [("host", EXTENT.nbytes)]
    assert holding.fds == (7,)


def test_a_region_may_end_where_its_extent_ends() -> None:
    end = LAST.offset + MANIFEST.regions[-1].nbytes
    foreign_memory(MANIFEST, begin(sizes=(end,)), [7])
    with pytest.raises(FramingError, match="'odd' outside its extent"):
        foreign_memory(MANIFEST, begin(sizes=(end - 1,)), [7])


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (begin(places=tuple(PLACES[:-1])), "places 4 regions, the manifest has 5"),
        (begin(places=(*PLACES, LAST)), "places 6 regions, the manifest has 5"),
        (begin(places=()), "places 0 regions"),
        (begin(places=(*PLACES[:-1], Place(1, 0))), "'odd' outside its extent"),
        (begin(places=(*PLACES[:-1], Place(-1, 0))), "'odd' outside its extent"),
        (begin(places=(Place(0, -1), *PLACES[1:])), "'k' outside its extent"),
        (begin(places=(*PLACES[:-1], Place(0, 1 << 62))), "'odd' outside its extent"),
        (begin(sizes=()), "'k' outside its extent"),
        (begin(devices=("host", "host")), "2 devices for 1 extents"),
        (begin(sizes=(EXTENT.nbytes, 4096), devices=("host",)), "1 devices for 2 extents"),
    ],
)
def test_memory_that_cannot_be_is_refused_by_name(lie: Begin, reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        foreign_memory(MANIFEST, lie, [7])
