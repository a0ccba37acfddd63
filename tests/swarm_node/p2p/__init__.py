"""Tests of `swarm_node.p2p`."""
