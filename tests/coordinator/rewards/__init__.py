"""Rewards of the operator's: signatures, processes that are killed, and what becomes of their groups."""
