"""The HTTP face of a node: a thin FastAPI layer over `worldmove.node`."""
