"""The sampling engine: a child process, so that its crashes, memory and libraries do not affect the agent."""

__all__ = [
    "capacity",
    "card_engine",
    "cards",
    "child",
    "choose",
    "client",
    "memory",
    "messages",
    "pool",
    "precision",
    "throughput",
    "turn_cache",
]
