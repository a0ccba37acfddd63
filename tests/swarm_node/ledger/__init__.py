"""Tests of `swarm_node.ledger`."""
