"""What several programs of the coordinator need: durable files, logs, child processes, safe text, TLS."""
