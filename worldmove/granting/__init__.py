"""Who may send how much: the decisions of the gate, without I/O and without a clock; times are passed in."""
