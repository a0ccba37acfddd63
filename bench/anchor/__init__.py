"""One swarm of real programs, played through by the simulator as well: what was measured beside what was foretold."""
