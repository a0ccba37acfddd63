"""Checks whether this machine can take part in a round, each with cause, evidence and next step."""
