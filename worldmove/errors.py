"""Every error that WorldMove raises on purpose, each with a stable `code`.

Foreign exceptions (UCX, SQLite, sockets) stop at the adapter that meets them and continue as one of
these. The REST layer maps classes to HTTP statuses in one table (`api/problems.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar


class WorldMoveError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: stable, hyphenated identifier; part of the contract.
        details: machine-readable facts (what was required, what was available, differing fields).
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def numbers(self, name: str) -> dict[str, float]:
        """The numbers by name of one of its details; whatever else a peer may have put there is left out."""
        found = self.details.get(name)
        if not isinstance(found, dict):
            return {}
        numbers = {key: value for key, value in found.items() if isinstance(value, int | float)}
        return {key: float(value) for key, value in numbers.items() if isinstance(key, str)}


class ConfigError(WorldMoveError):
    """An option has a value that is not allowed; the message names option, value and what is."""

    code = "config"


class ValidationError(WorldMoveError):
    """A field of a request is wrong; `details["field"]` names it."""

    code = "validation"


class ManifestError(ValidationError):
    """Regions are malformed, or do not match the standby's; `details["fields"]` names them."""

    code = "manifest"


class NotFoundError(WorldMoveError):
    """No such session, standby, migration or node."""

    code = "not-found"


class UnauthorizedError(WorldMoveError):
    """A token is missing, wrong, used up or of another role."""

    code = "unauthorized"


class ForbiddenError(UnauthorizedError):
    """The token is good, but its role may not do this; `details["roles"]` names the roles that may."""

    code = "forbidden"


class ConflictError(WorldMoveError):
    """The request is well formed but contradicts the present state."""

    code = "conflict"


class FingerprintMismatchError(ConflictError):
    """The two hosts would not generate the same bits; `details["fields"]` lists what differs."""

    code = "fingerprint-mismatch"


class AlreadyMovingError(ConflictError):
    """The session is in a move already; `details["migration_id"]` names it."""

    code = "already-moving"


class NotOwnerError(ConflictError):
    """This node does not own the session; `details["owner_url"]` names who does."""

    code = "not-owner"


class SamePlaceError(ConflictError):
    """Neither node nor devices would change."""

    code = "same-place"


class SessionExistsError(ConflictError):
    """The session id is in use."""

    code = "session-exists"


class IdempotencyMismatchError(WorldMoveError):
    """An `Idempotency-Key` came again with another body."""

    code = "idempotency-mismatch"


class RejectedError(WorldMoveError):
    """Base of rejections: the move cannot be taken on now; nothing has changed.

    `details` holds `required` and `available` where they are numbers, and `retry_after_ms`.
    """

    code = "rejected"


class InadmissibleError(RejectedError):
    """The move could not finish inside its deadline or horizon."""

    code = "inadmissible"


class RateLimitedError(RejectedError):
    """The client asks more often than it may; `details` has `retry_after_ms`."""

    code = "rate-limited"


class GateFullError(RejectedError):
    """The receiver has no room for another inbound move."""

    code = "gate-full"


class NoMemoryError(RejectedError):
    """Memory cannot be reserved; `details` has `required_bytes` and `available_bytes`."""

    code = "no-memory"


class NoWorkerError(RejectedError):
    """No standby waits at the destination."""

    code = "no-worker"


class TransportError(WorldMoveError):
    """A data-plane connection failed, closed, or broke its framing."""

    code = "transport"


class ConnectionLostError(TransportError):
    """The peer of a connection is gone."""

    code = "connection-lost"


class SlowPathError(TransportError):
    """A path was measured and brings less than it must; `details["gbps"]` is what it brings."""

    code = "path-too-slow"


class FramingError(TransportError):
    """A message has a wrong length, kind, magic or version."""

    code = "framing"


class DeviceError(WorldMoveError):
    """A GPU is not there, cannot be used, or refused what was asked of it."""

    code = "device"


class DeadlineError(WorldMoveError):
    """Something did not happen in its time."""

    code = "deadline"


class PeerError(WorldMoveError):
    """The other node is unreachable, stopped answering, or broke the protocol."""

    code = "peer"


class ProcessLostError(WorldMoveError):
    """A child process (executor, lane, keeper) ended while it was needed."""

    code = "process-lost"


class LedgerError(WorldMoveError):
    """The ledger cannot be reached or refused a write for a reason other than a lost race."""

    code = "ledger"


class LostRaceError(LedgerError):
    """A compare-and-swap found another record; `details["record"]` is the one that won."""

    code = "lost-race"


class FencedError(LedgerError):
    """This incarnation of the node is no longer the claimed one: it may write nothing."""

    code = "fenced"


class SessionEndedError(WorldMoveError):
    """The session or standby was ended at its node while its worker held it."""

    code = "session-ended"


class ProtocolError(WorldMoveError):
    """An event that the protocol's machine does not allow in its state; `details["history"]` is attached."""

    code = "protocol"


class MoveAbortedError(WorldMoveError):
    """A move ended without a commit; the source generates on. `details["reason"]` says why."""

    code = "aborted"


class SessionMoved(Exception):  # noqa: N818 - the contract's name; it is news, not an error
    """Raised by `World.boundary()` when the session has gone to its new owner.

    Attributes:
        destination: name of the node that owns the session now.
        endpoint: where its viewers are served now, or `None`.
    """

    def __init__(self, destination: str, endpoint: str | None) -> None:
        super().__init__(f"session moved to {destination}")
        self.destination = destination
        self.endpoint = endpoint
