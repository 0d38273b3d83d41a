"""The command line: `worldmove serve`, clients of a node, demo, benchmarks and doctor."""

from worldmove.cli.main import app, main

__all__ = ["app", "main"]
