"""A comparison of one swarm of real programs with its simulation: measured beside predicted values."""
