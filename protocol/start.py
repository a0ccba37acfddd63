"""The start and the end of a program, without a search for garbage.

An import of large libraries makes hundreds of thousands of objects that stay until the process ends. The garbage
collector would search all of them dozens of times while they grow in number, and once more at the end of the process: a
third of the processor time of a learner's start.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def end_quickly() -> None:
    """Exempt all objects from the collection at the end of this process."""
    atexit.register(gc.freeze)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage within this block."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
