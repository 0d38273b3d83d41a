"""What the node counts, for Prometheus. docs/metrics.md lists every name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from worldmove.views import GateView, MigrationView

PAUSE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
TOTAL_BUCKETS = (10, 50, 100, 500, 1000, 5000, 10000, 30000, 60000, 120000)
REJECTIONS = ("inadmissible", "gate-full", "no-memory", "no-worker")
SESSION_STATES = ("live", "paused", "unattended", "fenced", "lost", "ended")
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("moves_total", "Moves that ended.", ("role", "state")),
    ("moves_missed_total", "Committed moves that were late.", ()),
    ("sent_bytes_total", "Bytes of regions moved away.", ()),
    ("received_bytes_total", "Bytes that landed here.", ()),
    ("damaged_leaves_total", "Leaves that differed at the destination and were sent again.", ()),
    ("processes_lost_total", "Processes that ended.", ("kind",)),
    ("rejected_total", "Inbound moves that were not taken on.", ("code",)),
    ("recovered_total", "Slots of a former incarnation that were taken over.", ("kind",)),
)
HISTOGRAMS = (
    ("pause_milliseconds", "From the last rank's stop until the destination may generate.", PAUSE_BUCKETS),
    ("move_milliseconds", "Duration of moves that were released.", TOTAL_BUCKETS),
    ("snapshot_milliseconds", "How long a world stood for its spare copy.", PAUSE_BUCKETS),
)
GAUGES = (
    ("standbys", "Standbys that wait here."),
    ("moves_running", "Moves under way, in either direction."),
    ("lanes", "Data-plane processes."),
    ("executors", "Executor processes."),
    ("memory_free_bytes", "What sessions may still reserve."),
    ("gate_outstanding_bytes", "Bytes granted and not landed yet."),
    ("gate_waiting", "Requests that wait for a grant."),
    ("gate_granted_bytes", "Bytes granted since the start."),
    ("gate_bound_bytes", "What may be out at once."),
    ("gate_senders", "Senders that answer now."),
    ("gate_most_senders", "Senders that may answer at once."),
    ("gate_moves", "Inbound moves over lanes."),
    ("gate_waiting_pauses", "Moves that wait for leave to stop their world."),
    ("gate_collapses", "Breakdowns of goodput under several senders."),
    ("gate_cut_off", "Grants that a sender let go by."),
    ("gate_goodput_bytes_per_second", "What the line brings while somebody sends."),
    ("reserved_bytes_per_second", "Promised to inbound moves that were taken on."),
    ("incarnation", "This start of the node."),
)


class Metrics:
    """One registry per node; label values come from small, fixed sets, never from callers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "worldmove", "registry": self.registry}
        self._count = {key: Counter(key, text, labels, **own) for key, text, labels in COUNTERS}
        self._spread = {key: Histogram(key, text, buckets=edges, **own) for key, text, edges in HISTOGRAMS}
        self._gauges = {key: Gauge(key, text, **own) for key, text in GAUGES}
        self._sessions = Gauge("sessions", "Sessions here.", ["state"], **own)
        self._path = Gauge("path_gbps", "Last measured rate of a path.", ["path"], **own)

    def move_ended(self, role: str, view: MigrationView) -> None:
        """Counts a move that has ended on this node."""
        self._count["moves_total"].labels(role=role, state=view.state).inc()
        if role == "destination":
            self._count["received_bytes_total"].inc(view.sent_bytes)
            return
        receipt = view.receipt
        if receipt is None:
            return
        self._count["sent_bytes_total"].inc(receipt.sent_bytes)
        self._count["damaged_leaves_total"].inc(len(receipt.damaged))
        if receipt.missed:
            self._count["moves_missed_total"].inc()
        if receipt.pause_ms is not None:
            self._spread["pause_milliseconds"].observe(receipt.pause_ms)
        if receipt.state == "released":
            self._spread["move_milliseconds"].observe(receipt.total_ms)

    def rejected(self, code: str) -> None:
        """Counts an inbound move that was not taken on."""
        self._count["rejected_total"].labels(code=code if code in REJECTIONS else "other").inc()

    def process_lost(self, kind: str) -> None:
        """Counts an executor, lane or keeper that ended while the node lives; another one takes its place."""
        self._count["processes_lost_total"].labels(kind=kind).inc()

    def snapshot_taken(self, milliseconds: float) -> None:
        """Counts a snapshot by how long its world stood."""
        self._spread["snapshot_milliseconds"].observe(milliseconds)

    def recovered(self, kind: str) -> None:
        """Counts a session or standby that a former incarnation left."""
        self._count["recovered_total"].labels(kind=kind).inc()

    def path_rate(self, path: str, gbps: float) -> None:
        """Notes what a path has just carried."""
        self._path.labels(path=path).set(gbps)

    def render(self, *, sessions: Mapping[str, int], gate: GateView, gauges: Mapping[str, float]) -> bytes:
        """The exposition text, with the present values of everything that is not counted as it happens."""
        for state in SESSION_STATES:
            self._sessions.labels(state=state).set(sessions.get(state, 0))
        values = dict(gauges) | {
            "gate_outstanding_bytes": gate.outstanding_bytes,
            "gate_waiting": gate.waiting,
            "gate_granted_bytes": gate.granted_bytes,
            "gate_bound_bytes": gate.bound_bytes,
            "gate_senders": gate.senders,
            "gate_most_senders": gate.most_senders,
            "gate_moves": gate.moves,
            "gate_waiting_pauses": gate.waiting_pauses,
            "gate_collapses": gate.collapses,
            "gate_cut_off": gate.cut_off,
            "gate_goodput_bytes_per_second": gate.goodput_bytes_per_s or 0.0,
        }
        for key, gauge in self._gauges.items():
            gauge.set(values.get(key, 0))
        return generate_latest(self.registry)
