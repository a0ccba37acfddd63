"""Durable files, locks, logs and waiting: what every part of the node needs."""
