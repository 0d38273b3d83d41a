"""Kernels: each operation's plain reference, and beside it the versions for a device."""
