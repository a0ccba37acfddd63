"""Bytes of live tensors, counted by torch's own allocator: no clock, and no noise of the process around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.autograd.profiler import profile


@dataclass
class LiveBytes:
    """Bytes of CPU tensors above those at the start of the block; complete when the block has ended."""

    peak: int = 0
    left: int = 0
    """Still alive at the end."""


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Count what the block allocates and frees; tensors that are mapped from files cost nothing."""
    count = LiveBytes()
    with profile(profile_memory=True) as profiler:  # torch.profiler's makes an object of each event: most of a test
        yield count
    events = profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    course = list(accumulate(event.nbytes() for event in changes))
    count.peak, count.left = max(course, default=0), course[-1] if course else 0
