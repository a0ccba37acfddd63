"""Cost of a signed request for the coordinator, and its behaviour under more requests than it can process."""
