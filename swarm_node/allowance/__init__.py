"""The owner's limits for a node: working hours, and shares of the machine and the network."""
