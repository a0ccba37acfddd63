"""Tests of `swarm_node.keys`."""
