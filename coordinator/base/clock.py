"""The coordinator's clock, which times all that it records."""

import time


def now_ms() -> int:
    """Return milliseconds since 1970."""
    return time.time_ns() // 1_000_000
