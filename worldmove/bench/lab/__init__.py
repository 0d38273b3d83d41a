"""The incast laboratory: hosts of its own on one machine, with a shallow switch port in front of one of them."""
