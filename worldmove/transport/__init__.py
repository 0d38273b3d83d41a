"""The data plane: UCX behind one seam, its in-memory twin, and the lanes."""
