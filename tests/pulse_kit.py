"""Whether nodes answer all the time while a test does something else."""

from __future__ import annotations

import threading

import httpx
from fleet_kit import Node


class Pulse:
    """Asks nodes for their health, again and again; `failures` says which time one did not answer."""

    def __init__(self, *nodes: Node) -> None:
        self.beats = 0
        self.failures: list[str] = []
        self._urls = [node.url for node in nodes]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                for url in self._urls:
                    self.beats += 1
                    try:
                        client.get(f"{url}/v1/healthz").raise_for_status()
                    except httpx.HTTPError as error:
                        self.failures.append(f"{url}: {error!r}")
                if self._over.wait(0.1):
                    return

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert not self.failures, f"{len(self.failures)} of {self.beats}: {self.failures[:5]}"
