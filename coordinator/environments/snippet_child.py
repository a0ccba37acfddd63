"""A program of its own: it runs one snippet of Python within limits of the kernel, then the checks of its results.

from the parent  the length of a JSON object, then that object, then the snippet's standard input
to the parent    on standard output, what the snippet prints, and records of JSON, each behind a line with the mark

    {"error": "NameError: …"}    of the snippet, or of the check before
    {"passed": 1}                a check that passed
    {"done": 1, "value": "…"}    the end, with the value of the last expression

- It ends with the parent, at any time, and with it all processes that the snippet has started.
- The mark is random, so that a snippet does not print records by chance. A snippet that attacks its own checks can
  find it: it runs in the same process.
- Only the standard library is imported, and nothing of this package: the program starts in hundredths of a second.
"""

import ast
import json
import linecache
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from contextlib import suppress
from typing import Any

NAME = "<snippet>"
PARENT_CHECK_S = 0.2
"""The interval at which a thread checks for the parent: not every system signals its death."""

VALUE_MAX_CHARS = 10_000
LENGTH_BYTES = 8


def main() -> None:
    parent = os.getppid()
    task = json.loads(_exactly(int.from_bytes(_exactly(LENGTH_BYTES), "big")).decode(errors="surrogatepass"))
    for kind, limit in task["limits"].items():
        _limit(getattr(resource, kind), limit)
    threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    random.seed(0)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    records = _Records(task["mark"])
    value = _run(task["code"], module.__dict__, records)
    if value is not None:
        for check in task["checks"]:
            if _run(check, module.__dict__, records) is not None:
                records.send({"passed": 1})
        records.send({"done": 1, "value": value})
    _end()


class _Records:
    """The records on standard output."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def send(self, record: dict[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the snippet may have closed or replaced it
                stream.flush()
        data = f"\n{self._mark}{json.dumps(record)}\n".encode()
        while data:
            data = data[os.write(1, data) :]


def _run(code: str, names: dict[str, Any], records: _Records) -> str | None:
    """Run code; return the value of its last expression as text, or None after an error."""
    try:
        linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
        tree = ast.parse(code, NAME)
        last = tree.body[-1].value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(ast.Module(tree.body[: -1 if last else None], []), NAME, "exec"), names)
        value = eval(compile(ast.Expression(last), NAME, "eval"), names) if last else None
        return "" if value is None else repr(value)[:VALUE_MAX_CHARS]
    except BaseException as error:  # any error of the snippet is its result
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return ""
        _report(error, records)
        return None


def _report(error: BaseException, records: _Records) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace, limit=-20)
        text = str(error)
    except BaseException:  # the exception is an object of the snippet, and may be broken
        text = ""
    records.send({"error": f"{type(error).__name__}: {text[:200]}".encode(errors="replace").decode()})


def _limit(kind: int, limit: int) -> None:
    """Lower a limit, but never above one that holds already."""
    _, most = resource.getrlimit(kind)
    # Processor time: a signal at the soft limit, which the snippet may catch, and the end one second later.
    hard = limit + 1 if kind == resource.RLIMIT_CPU else limit
    hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(kind, (min(limit, hard), hard))


def _exactly(size: int) -> bytes:
    """Return bytes of standard input, and leave the rest to the snippet."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    _end()


def _end() -> None:
    """End this process with all that it has started; in a sandbox, whose group it shares, only this process."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
