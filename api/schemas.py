"""Bodies of requests: strict, bounded, and turned into the values that the node takes.

Unknown fields are refused: a misspelt option must not be silently ignored in a request that moves a world.
Answers are the structs of `worldmove.views`; their schemas are put into the OpenAPI by `api.openapi`.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from worldmove import manifest
from worldmove.errors import ValidationError
from worldmove.manifest import MAX_HOST_STATE, MAX_RANKS, MAX_REGION_BYTES, MAX_REGIONS, Manifest
from worldmove.views import MigrationRequest, PathChoice, SessionSpec

MAX_WAIT_MS = 30_000.0
MAX_FINGERPRINT = 256
MAX_MS = 86_400_000.0

Id = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
Milliseconds = Annotated[float, Field(gt=0, le=MAX_MS, allow_inf_nan=False)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=MAX_REGION_BYTES)]
Fingerprint = Annotated[
    dict[Text, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=MAX_FINGERPRINT)
]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceBody(Body):
    """Where a region's memory comes from: the node's arena, shared memory by name, a GPU's by handle."""

    kind: Literal["arena", "shm", "cuda-ipc"] = "arena"
    name: Text | None = None
    offset: Bytes = 0
    handle: Text | None = None
    pid_namespace: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None


class RegionBody(Body):
    """One named contiguous tensor."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=manifest.MAX_NAME)]
    dtype: Annotated[str, StringConstraints(min_length=1, max_length=32)]
    shape: Annotated[list[Bytes], Field(max_length=manifest.MAX_DIMS)]
    device: Text = "host"
    rank: Annotated[int, Field(strict=True, ge=0, lt=MAX_RANKS)] = 0
    stride_bytes: Annotated[int, Field(strict=True, gt=0, le=MAX_REGION_BYTES)] | None = None
    source: SourceBody = SourceBody()


class StandbyBody(Body):
    """A worker that waits on this node to be handed a session of exactly this make."""

    model: Text
    endpoint: Url | None = None
    regions: Annotated[list[RegionBody], Field(max_length=MAX_REGIONS)]
    block_ms: Milliseconds
    horizon_ms: Milliseconds
    host_state_bytes: Annotated[int, Field(strict=True, ge=0, le=MAX_HOST_STATE)] = 64 * 1024
    snapshot_every: Annotated[int, Field(strict=True, ge=0, le=manifest.MAX_SNAPSHOT_EVERY)] = 0
    fingerprint: Fingerprint = {}

    def spec(self, session_id: str | None = None) -> SessionSpec:
        """The registration as the node takes it.

        Raises:
            ManifestError: the regions are no possible manifest; the field is named.
        """
        regions = tuple(
            manifest.Region(
                name=region.name,
                dtype=region.dtype,
                shape=tuple(region.shape),
                device=region.device,
                rank=region.rank,
                stride_bytes=region.stride_bytes,
                source=manifest.Source(**region.source.model_dump()),
            )
            for region in self.regions
        )
        made = Manifest(
            model=self.model,
            regions=regions,
            block_ms=self.block_ms,
            horizon_ms=self.horizon_ms,
            host_state_bytes=self.host_state_bytes,
            endpoint=self.endpoint,
            snapshot_every=self.snapshot_every,
        )
        manifest.validate(made)
        return SessionSpec(manifest=made, fingerprint=dict(self.fingerprint), id=session_id)


class SessionBody(StandbyBody):
    """A running world; the node chooses an id where none is given."""

    id: Id | None = None


class BoundaryBody(Body):
    """One rank stands at the boundary after `block`; `host_state` is base64."""

    rank: Annotated[int, Field(strict=True, ge=0, lt=MAX_RANKS)] = 0
    block: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    host_state: str = ""
    wait_ms: Annotated[float, Field(ge=0, le=MAX_WAIT_MS, allow_inf_nan=False)] = 0.0

    def decoded_state(self) -> bytes:
        """The host state as bytes.

        Raises:
            ValidationError: it is no base64, or longer than any session may have.
        """
        try:
            # Lenient decoders drop what they don't know: the state would change without a word.
            state = base64.b64decode(self.host_state, validate=True)
        except ValueError as error:
            raise ValidationError(f"host_state is no base64 ({error})", field="host_state") from error
        if len(state) > MAX_HOST_STATE:
            raise ValidationError(
                f"host_state has {len(state)} bytes; at most {MAX_HOST_STATE} are allowed",
                field="host_state",
            )
        return state


class AttachBody(Body):
    """A worker takes up a session whose worker is gone."""

    fingerprint: Fingerprint = {}


class ResolveBody(Body):
    """What becomes of a session that nothing else settles; `confirm` repeats its id."""

    decision: Literal["keep", "end"]
    confirm: Id

    def check(self, session_id: str) -> None:
        """Checks that whoever asks has read what is asked for.

        Raises:
            ValidationError: `confirm` is another id.
        """
        if self.confirm != session_id:
            raise ValidationError(f"confirm must repeat the session's id, {session_id!r}", field="confirm")


class MigrationBody(Body):
    """A move. What is left out is the session's or the node's own value."""

    session_id: Id
    destination: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    devices: Annotated[dict[Text, Text], Field(max_length=MAX_RANKS)] = {}
    horizon_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    live: bool = True
    codec: Literal["auto", "none"] = "auto"
    path: PathChoice | None = None
    allow_unattended: bool = False

    def request(self) -> MigrationRequest:
        """The move as the node takes it."""
        return MigrationRequest(**self.model_dump())
