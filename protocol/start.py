"""The start of a program: what holds for all its imports.

An import of large libraries makes hundreds of thousands of objects that stay until the process ends. The garbage
collector would search all of them dozens of times while they grow in number, and once more at the end of the process: a
third of the processor time of a learner's start.
"""

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "1")
"""The search for plugins reads every installed package. None is to see settings and signed messages."""


def prepare() -> None:
    """Prepare this process, before its first import of a library."""
    os.environ.setdefault(*NO_PLUGINS)
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
