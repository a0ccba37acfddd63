"""Tests of `swarm_node.work`."""
