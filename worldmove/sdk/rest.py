"""The few REST calls that a worker makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from worldmove.dialing import http_options
from worldmove.errors import PeerError, WorldMoveError
from worldmove.sdk.problems import error_of
from worldmove.views import Registration, SessionView


class NodeApi:
    """A node's REST interface, as workers use it.

    Args:
        url: of the node.
        token: bearer token of the role `worker`.
        timeout: seconds for one call; registering many gigabytes takes a while.
        tls_ca: PEM file of the authorities that are trusted; the system's own if left out.

    Raises:
        ConfigError: `tls_ca` can't be used.
    """

    def __init__(self, url: str, token: str | None, timeout: float, tls_ca: Path | str | None = None) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/"), **http_options(token or None, timeout, tls_ca))

    def open(self, path: str, body: dict[str, Any]) -> Registration:
        """Registers a session, a standby or an attachment.

        Raises:
            PeerError: the node can't be reached or answered nonsense.
            WorldMoveError: it refused; the class is that of the problem's code.
        """
        return msgspec.convert(self._call("POST", path, body), Registration)

    def session(self, session_id: str) -> SessionView:
        """What the node knows of a session; raises as `open`."""
        return msgspec.convert(self._call("GET", session_path(session_id)), SessionView)

    def end(self, path: str) -> None:
        """Ends a session or standby; raises as `open`."""
        self._call("DELETE", path)

    def close(self) -> None:
        """Closes idle connections."""
        self._http.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
            answer = msgspec.json.decode(response.content) if response.content else None
        except httpx.HTTPError as error:
            raise PeerError(f"node {self._http.base_url}: {type(error).__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise PeerError(f"node {self._http.base_url} answered no JSON") from error
        if response.is_success:
            return answer
        raise _problem(response.status_code, answer)


def _problem(status: int, answer: Any) -> WorldMoveError:
    if not isinstance(answer, dict) or not isinstance(answer.get("code"), str):
        return PeerError(f"the node answered with status {status}")
    known = ("type", "title", "status", "detail", "code", "instance")
    details = {key: value for key, value in answer.items() if key not in known}
    return error_of(answer["code"], str(answer.get("detail", answer["code"])), details)


def session_path(session_id: str) -> str:
    """Of one session."""
    return f"/v1/sessions/{quote(session_id, safe='')}"


def standby_path(standby_id: str) -> str:
    """Of one standby."""
    return f"/v1/standbys/{quote(standby_id, safe='')}"
