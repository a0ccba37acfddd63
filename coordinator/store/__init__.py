"""The coordinator's store: tables, their schema and its upgrades, one writer over SQLite or PostgreSQL."""

__all__ = ["facts", "rows", "schema", "state", "tables", "upgrading"]
