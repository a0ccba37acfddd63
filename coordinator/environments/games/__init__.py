"""Games of this repository: poker against seeded opponents, and Sokoban, as deterministic state machines of text."""
