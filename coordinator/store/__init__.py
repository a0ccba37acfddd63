"""The coordinator's store: tables, their schema and its upgrades, one writer over SQLite or PostgreSQL."""
