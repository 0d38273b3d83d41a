"""Which standby can take a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worldmove import fingerprint as prints
from worldmove.errors import FingerprintMismatchError, ManifestError, NoWorkerError, SamePlaceError
from worldmove.hosting.slots import Slot
from worldmove.manifest import Manifest
from worldmove.placement import Wanted, changes, differences

RETRY_AFTER_MS = 1000
ANY = Wanted()


def find_standby(
    standbys: Iterable[Slot], manifest: Manifest, fingerprint: Mapping[str, str], wanted: Wanted = ANY
) -> Slot:
    """A vacant standby that can take the session.

    Raises:
        NoWorkerError: none waits here.
        SamePlaceError: those that could take it have its regions on the very devices on which they lie.
        FingerprintMismatchError, ManifestError: those that wait can't; `details["fields"]` says why.
    """
    vacant = [slot for slot in standbys if slot.vacant]
    nearest: tuple[int, list[str], list[str]] | None = None
    staying = None
    for slot in vacant:
        regions = differences(manifest, slot.manifest, wanted.devices)
        bits = prints.differences(fingerprint, slot.fingerprint)
        if wanted.elsewhere and not changes(manifest, slot.manifest):
            staying = slot if not regions and not bits else staying
            continue
        if not regions and not bits:
            return slot
        distance = len(regions) + len(bits)
        if nearest is None or distance < nearest[0]:
            nearest = (distance, regions, bits)
    if staying is not None:
        raise SamePlaceError(
            f"standby {staying.id!r} lies on the session's own devices; another device is needed"
        )
    if nearest is None:
        raise NoWorkerError(
            "no standby at the destination", required=1, available=0, retry_after_ms=RETRY_AFTER_MS
        )
    if nearest[2]:
        raise FingerprintMismatchError(f"the standby differs in {nearest[2]}", fields=nearest[2])
    raise ManifestError(f"the standby differs in {nearest[1]}", field="regions", fields=nearest[1])
