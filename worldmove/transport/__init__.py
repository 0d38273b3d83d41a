"""The data plane: UCX behind one seam, and the lanes."""
