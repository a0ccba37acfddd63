"""What a signed request costs the coordinator, and what it does when there are more of them than it can take."""
