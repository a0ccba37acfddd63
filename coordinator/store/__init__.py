"""What the coordinator remembers: tables, their schema and its upgrades, one writer over SQLite or PostgreSQL."""
