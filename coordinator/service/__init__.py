"""Parts of the running coordinator: the round, its publication, fetch plans, backups and local nodes."""
