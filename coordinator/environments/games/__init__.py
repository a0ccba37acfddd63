"""Our own games: poker against seeded opponents, and Sokoban, as deterministic state machines of text."""
