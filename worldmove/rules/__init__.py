"""The rules of a move: pure functions from facts and an event to the next step."""
