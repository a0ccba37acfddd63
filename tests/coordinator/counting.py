"""Counts what requests cost, thread by thread: values decoded, signatures checked, statements run."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nacl.signing import VerifyKey
from sqlalchemy.engine.default import DefaultDialect

from protocol.wire import canonical

WRITER = "writer"
"""The name of the writer's thread begins with it."""

_MEASURE = canonical._measure.__code__
_VERIFY = VerifyKey.verify.__code__
_STATEMENTS = {DefaultDialect.do_execute.__code__, DefaultDialect.do_executemany.__code__}


class Work:
    """The work of all threads since the counting began; `writer` counts the writer's part of it."""

    def __init__(self) -> None:
        self.all, self.writer = Counter[str](), Counter[str]()

    def clear(self) -> None:
        self.all.clear()
        self.writer.clear()

    def hear(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "return" and frame.f_code is _MEASURE:
            self._add("values", frame.f_locals.get("items", 0))
        elif event == "call" and frame.f_code is _VERIFY:
            self._add("signatures", 1)
        elif event == "call" and frame.f_code in _STATEMENTS:
            self._add("statements", 1)

    def _add(self, kind: str, count: int) -> None:
        self.all[kind] += count
        if threading.current_thread().name.startswith(WRITER):
            self.writer[kind] += count


@contextmanager
def counted() -> Iterator[Work]:
    """Count in this thread, and in all that begin meanwhile: open the store after this."""
    work = Work()
    threading.setprofile(work.hear)
    sys.setprofile(work.hear)
    try:
        yield work
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
