"""Memory as descriptors: arenas, and the keeper that holds them."""
