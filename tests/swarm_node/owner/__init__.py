"""Tests of `swarm_node.owner`."""
