"""`worldmove soak`: moves with random faults over several real nodes and worlds, every block checked."""
