"""Moves under simulated time: the node's own admission and gate, for capacity planning."""
