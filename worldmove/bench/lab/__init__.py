"""The incast laboratory: hosts of its own on one machine, one of them behind a shallow port."""
