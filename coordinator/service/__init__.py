"""What lives as long as the coordinator runs: the round, its publication, plans, backups and local nodes."""
