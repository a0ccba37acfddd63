"""Helpers of all parts of the node: durable files, locks, logs and waiting."""
