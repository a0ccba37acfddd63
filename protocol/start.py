"""The start and the end of a program, without a search for garbage and without libraries that it does not use.

- An import of large libraries makes hundreds of thousands of objects that stay until the process ends. The garbage
  collector would search all of them dozens of times while they grow in number, and once more at the end of the process:
  a third of the processor time of a learner's start.
- Some libraries import others only in case they are installed, for a use that our programs do not make of them. Code of
  the operator, and libraries that the operator chose, may need them: `allow_left_out` comes before these.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = (
    "boto3",  # tuf's signers in a cloud: 0.15 s. We sign with files, and speak to object stores ourselves.
    "httpx._main",  # a command line of its own, with click, rich and pygments: 0.06 s
)
"""Modules that libraries import if they exist, and that no program of ours uses."""

INTERRUPTED = "KeyboardInterrupt"
"""The text in pydantic's error about a class that was being built when Ctrl-C came."""

_left_out = set[str]()


def leave_out(*modules: str) -> None:
    """Let imports of these modules in this process fail, as if they were not installed."""
    for module in set(modules) - sys.modules.keys():
        sys.modules[module] = None  # type: ignore[assignment]  # Python's own mark, unknown to typeshed
        _left_out.add(module)


def allow_left_out() -> None:
    """Let the modules that were left out be imported from now on."""
    while _left_out:
        del sys.modules[_left_out.pop()]


def end_quickly() -> None:
    """Exempt all objects from the collection at the end of this process."""
    atexit.register(gc.freeze)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage within this block; Ctrl-C is a `KeyboardInterrupt` also while pydantic builds a class."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "SchemaError" and INTERRUPTED in str(error):
            raise KeyboardInterrupt from None
        raise
    finally:
        if collects:
            gc.enable()
