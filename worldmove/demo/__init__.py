"""The reference world, and the demonstration that moves it."""
