"""Parts of the running coordinator: the round, its publication, fetch plans, backups and local nodes."""

__all__ = [
    "backup.archive",
    "backup.following",
    "backup.making",
    "backup.restoring",
    "group_scorer",
    "local_nodes",
    "notices",
    "opening",
    "publication",
    "round",
    "tls",
    "waiting",
    "witness_calls",
]
