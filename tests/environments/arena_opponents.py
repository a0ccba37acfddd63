"""Opponents for TextArena's games."""

import random


def first_free(read: str, chance: random.Random) -> str:
    """Return the first free cell of the board that was read last."""
    return "[" + read.rpartition("Available Moves: '[")[2].partition("]")[0] + "]"


def silent(read: str, chance: random.Random) -> str:
    """Return no move."""
    return "I say nothing."
