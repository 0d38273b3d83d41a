"""Benchmarks as commands; none of their figures is asserted in a test."""
