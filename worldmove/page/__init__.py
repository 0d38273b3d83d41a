"""What a node and its workers share: the control page (`control`) and their messages (`messages`)."""
