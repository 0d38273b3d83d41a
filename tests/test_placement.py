"""Where regions may lie after a move: pure comparisons, and the standby that is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worldmove.errors import ManifestError, NoWorkerError, SamePlaceError, ValidationError
from worldmove.hosting.matching import find_standby
from worldmove.ledger.records import MoveRef, SessionRecord, adopt, begin, commit, reclaim, release
from worldmove.manifest import Manifest, Region, Source
from worldmove.node.asking import check_elsewhere, device_map
from worldmove.node.verdicts import superseded
from worldmove.placement import Wanted, changes, differences, placed, travelled

G0, G1, G2 = (f"GPU-{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}" for n in "012")


def manifest(*devices: str, **source: Any) -> Manifest:
    regions = tuple(
        Region(f"r{number}", "uint8", (8,), device=device, source=Source(**source))
        for number, device in enumerate(devices)
    )
    return Manifest("m", regions, block_ms=1.0, horizon_ms=1.0)


def slot(*devices: str, vacant: bool = True) -> Any:
    return SimpleNamespace(id="-".join(devices), manifest=manifest(*devices), fingerprint={}, vacant=vacant)


def test_a_map_says_where_and_without_one_any_gpu_will_do() -> None:
    mine = manifest("host", G0, G1)
    assert differences(mine, manifest("host", G2, G2)) == []
    assert differences(mine, manifest("host", G2, G1), {G0: G2}) == []
    assert differences(mine, manifest("host", G1, G2), {G0: G2}) == ["regions.r1.device"]
    assert differences(mine, manifest(G0, G0, "host")) == ["regions.r0.device", "regions.r2.device"]


def test_regions_are_placed_in_arenas_of_the_mapped_devices() -> None:
    mine = manifest(G0, G0, kind="cuda-ipc", handle="x", pid_namespace=1)
    there = placed(mine, {G0: G1})
    assert [(region.device, region.source) for region in there.regions] == [(G1, Source())] * 2
    assert (changes(mine, there), changes(mine, placed(mine))) == (True, False)
    assert travelled(manifest("host", G0, G1, G0), manifest("host", G1, G1, G1)) == ((G0, G1), (G1, G1))
    assert manifest("host", G1, G0, G1).gpus == (G1, G0)


def test_the_standby_that_is_chosen() -> None:
    mine = manifest(G0, "host")
    here, there, gone = slot(G0, "host"), slot(G1, "host"), slot(G1, "host", vacant=False)
    assert find_standby([here, there], mine, {}) is here
    assert find_standby([here, there], mine, {}, Wanted(elsewhere=True)) is there
    assert find_standby([here, there], mine, {}, Wanted({G0: G1})) is there
    with pytest.raises(SamePlaceError, match=here.id):
        find_standby([here, gone], mine, {}, Wanted(elsewhere=True))
    with pytest.raises(NoWorkerError):
        find_standby([gone], mine, {}, Wanted(elsewhere=True))
    with pytest.raises(ManifestError) as refused:
        find_standby([here, there], mine, {}, Wanted({G0: G2}))
    assert refused.value.details["fields"] == ["regions.r0.device"]


def named(name: str) -> str:
    found = {"0": G0, "1": G1, "host": "host", G0: G0, G1: G1}.get(name)
    if found is None:
        raise ValidationError(f"no {name}", field="devices")
    return found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),
        ({"0": "7"}, {G0: "7"}),
        ({G0: G2, "host": "host"}, {G0: G2, "host": "host"}),
        ({"1": "0"}, None),
        ({"0": G1, G0: G1}, None),
        ({"0": "host"}, None),
        ({"host": "0"}, None),
        ({"gpu": "0"}, None),
    ],
)
def test_devices_of_a_request(asked: dict[str, str], found: dict[str, str] | None) -> None:
    if found is not None:
        assert device_map(asked, manifest("host", G0), named) == found
        return
    with pytest.raises(ValidationError) as refused:
        device_map(asked, manifest("host", G0), named)
    assert refused.value.details["field"] == "devices"


def test_a_move_to_where_the_session_is() -> None:
    for devices, regions in (({}, ("host",)), ({G0: G0}, (G0, "host"))):
        with pytest.raises(SamePlaceError):
            check_elsewhere("w", "A", manifest(*regions), devices)
    check_elsewhere("w", "A", manifest(G0, "host"), {})
    check_elsewhere("w", "A", manifest(G0, G1), {G0: G0})


def test_of_two_slots_of_one_session_the_record_tells_which_is_the_world() -> None:
    """After a node died in a move from it to itself: `old` is the slot that it left, `new` the standby."""
    move = MoveRef(move_id="m", source="A", source_incarnation=1, destination="A", destination_incarnation=1)
    owned = SessionRecord(session_id="w", epoch=5, owner="A", incarnation=1, model="m")
    begun = begin(owned, move)
    committed = commit(begun, block=3, revision=1, root="00")
    adopted = adopt(committed, owned.holder, endpoint=None)
    released = release(adopted, owned.holder)
    reclaimed = reclaim(committed, owned.holder)
    promised, installed = [(0, "m")], [(6, None)]
    for record, others, expected in (
        (owned, promised, False),
        (adopted, promised, True),
        (adopted, installed, True),
        (released, promised, True),
        (released, installed, True),
        (reclaimed, promised, False),
        (owned, [(0, None), (0, "another")], False),
    ):
        assert superseded(record, 5, others) is expected, record
    for record in (adopted, released):
        assert not superseded(record, 6, [(5, None)]), "the standby is not superseded by what it has left"
