"""What to send, and what lies at the destination already: plans from two leaf tables. Pure NumPy, no I/O."""

from worldmove.delta.cutting import batches, long_batches

__all__ = ["batches", "long_batches"]
