"""A world with the shape of a published video world model, in PyTorch; small ones run on CPUs."""
