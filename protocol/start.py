"""The start and the end of a program, without a search for garbage.

An import of large libraries makes hundreds of thousands of objects that stay until the process ends. The garbage
collector would search all of them dozens of times while they grow in number, and once more at the end of the process: a
third of the processor time of a learner's start.

Libraries also import clients of services if they are installed, though nobody here uses them.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def end_quickly() -> None:
    """Exempt all objects from the collection at the end of this process."""
    atexit.register(gc.freeze)


UNUSED = ("boto3",)
"""`securesystemslib` imports it for keys in a cloud: 200 modules, a fifteenth of a coordinator's start."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage within this block, and import nothing of `UNUSED`."""
    collects = gc.isenabled()
    hidden = [name for name in UNUSED if name not in sys.modules]
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how the import system excludes a module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.enable()
