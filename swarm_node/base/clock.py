"""The clock of this machine; the coordinator's time is `swarm_node.coordinator_api.client.Coordinator.now_ms`."""

import time


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000
