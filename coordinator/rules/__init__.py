"""Decisions as pure functions, without a store, a clock or random numbers. The simulator runs the same code."""
