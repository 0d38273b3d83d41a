"""The command line: `worldmove serve`, clients of a node, demo, benchmarks and doctor."""

from worldmove.cli.start import main

__all__ = ["main"]
