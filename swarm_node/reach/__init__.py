"""How other nodes reach this one: where it listens, and what the router forwards."""
