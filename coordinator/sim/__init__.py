"""Simulation of a swarm with a virtual clock: the coordinator's own admission, capacity and fleet; simulated nodes.

`scenario` has the settings, `world` the events, `report` the results.
"""

__all__ = ["report", "scenario", "world"]
