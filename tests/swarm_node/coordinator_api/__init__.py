"""Tests of `swarm_node.coordinator_api`."""
