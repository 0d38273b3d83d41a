"""Stands in for CUDA's bindings where there is no GPU: see `driver`."""
