"""The service: one node, its sessions, its moves, and what it lends to them."""

from worldmove.node.service import Node

__all__ = ["Node"]
