"""Which standby can take a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worldmove import fingerprint as prints
from worldmove.errors import FingerprintMismatchError, ManifestError, NoWorkerError
from worldmove.hosting.slots import Slot
from worldmove.manifest import Manifest, differences

RETRY_AFTER_MS = 1000


def find_standby(standbys: Iterable[Slot], manifest: Manifest, fingerprint: Mapping[str, str]) -> Slot:
    """A vacant standby that can take the session.

    Raises:
        NoWorkerError: none waits here.
        FingerprintMismatchError, ManifestError: those that wait can't; `details["fields"]` says why.
    """
    vacant = [slot for slot in standbys if slot.vacant]
    if not vacant:
        raise NoWorkerError(
            "no standby at the destination", required=1, available=0, retry_after_ms=RETRY_AFTER_MS
        )
    nearest: tuple[int, list[str], list[str]] | None = None
    for slot in vacant:
        regions = differences(manifest, slot.manifest)
        bits = prints.differences(fingerprint, slot.fingerprint)
        if not regions and not bits:
            return slot
        distance = len(regions) + len(bits)
        if nearest is None or distance < nearest[0]:
            nearest = (distance, regions, bits)
    if nearest is not None and nearest[2]:
        raise FingerprintMismatchError(f"the standby differs in {nearest[2]}", fields=nearest[2])
    fields = nearest[1] if nearest is not None else []
    raise ManifestError(f"the standby differs in {fields}", field="regions", fields=fields)
