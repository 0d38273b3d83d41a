"""Clients of a node's REST interface, blocking and asynchronous."""

from worldmove.client.aio import AsyncClient
from worldmove.client.sync import Client

__all__ = ["AsyncClient", "Client"]
