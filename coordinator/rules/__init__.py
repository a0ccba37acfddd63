"""Decisions as pure functions: no store, no clock, no chance of their own. The simulator runs the same code."""
