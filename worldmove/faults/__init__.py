"""Faults by name, for tests and `worldmove soak`: only on nodes that were started with them."""
