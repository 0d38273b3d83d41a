"""Sessions and standbys on one node: their memory, their ranks, and the door through which workers come."""
