"""Tests of `swarm_node.versions`."""
