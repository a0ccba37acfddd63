"""Tests of `swarm_node.chunks`."""
