"""WorldMove moves a live session from one device to another: bit-identical, or nothing is installed."""
