"""Imports of large libraries without garbage collection: a third of the processor time of a start.

- An import makes hundreds of thousands of objects that stay until the process ends. While they grow in number, the
  collector searches all of them dozens of times, and once more at the end of the process.
- What exists after an import is excluded from all later collections, garbage too: 9 MB after torch and transformers. So
  nothing large that is thrown away later may exist then.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage within this block, and exclude what exists at its end, if it imported a module."""
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if collects:
            gc.enable()
