"""Tests of `swarm_node.picker`."""
