"""A swarm under a virtual clock: the coordinator's own admission, capacity and fleet, and nodes that only take time.

Read `scenario` for what can be set, `world` for what happens, `report` for what is told of it.
"""
