"""A reward process: it loads the operator's functions, then judges one question at a time.

- The functions' output goes to standard error, of which the coordinator keeps the end.
- Its memory, and its processor time for each question, are limited: the kernel ends it at the limit, even after the
  coordinator has ended.
- It enters its sandbox before it loads anything of the operator's.
- It ends with the coordinator, at any time.
"""

import json
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from coordinator.tasks import reward_functions, sandbox
from coordinator.tasks.problem_file import from_value
from coordinator.tasks.reward_functions import Job, Weighted
from coordinator.tasks.reward_process import LENGTH, pack, rewards_to
from protocol.errors import ConfigInvalid

START_CPU_S = 120
"""The processor time for the imports of the functions; torch needs a tenth of it."""

PARENT_CHECK_S = 0.5
"""The interval at which a thread checks for the parent: not every system signals its death."""

REASON_MAX_CHARS = 400


def main() -> None:
    parent = os.getppid()
    questions, answers = _own_pipes()
    settings = _receive(questions)
    _limit(settings["memory_mib"])
    places = [place for place, _ in settings["functions"]]
    missing = sandbox.enter(settings["sandbox"], places) if settings["sandbox"] else []
    threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()
    try:
        loaded = [reward_functions.load(place, weight) for place, weight in settings["functions"]]
    except BaseException as error:  # reported to the operator
        _send(answers, {"error": _reason(error)})
        return
    _send(answers, {"ready": True, "missing": missing})
    while True:
        _send(answers, _answer(loaded, _receive(questions)))


def _answer(loaded: list[Weighted], question: dict[str, Any]) -> dict[str, Any]:
    _allow_cpu(question["timeout_s"])
    job = Job(from_value(question["problem"]), question["completions"], question["tokens"])
    try:
        return {"rewards": rewards_to(reward_functions.judge(loaded, job))}
    except BaseException as error:  # any error of the operator's code is the answer
        return {"error": _reason(error)}


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the child's ends of the pipes; the functions' input and output do not use them."""
    questions, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return os.fdopen(questions, "rb"), os.fdopen(answers, "wb")


def _receive(questions: BinaryIO) -> dict[str, Any]:
    head = questions.read(LENGTH.size)
    if len(head) < LENGTH.size:
        os._exit(0)  # the coordinator has ended
    value: dict[str, Any] = json.loads(questions.read(*LENGTH.unpack(head)).decode(errors="surrogatepass"))
    return value


def _send(answers: BinaryIO, value: dict[str, Any]) -> None:
    answers.write(pack(value))
    answers.flush()


def _limit(memory_mib: int) -> None:
    size = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _allow_cpu(START_CPU_S)


def _allow_cpu(seconds: float) -> None:
    """Allow `seconds` more of processor time from now on; then the kernel sends its signal."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 2, most))


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _reason(error: BaseException) -> str:
    said = str(error)
    with suppress(Exception):  # the exception object may itself be broken
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and not isinstance(error, reward_functions.BadAnswer):
            said += f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    said += sandbox.explained(error)
    kind = "" if isinstance(error, reward_functions.BadAnswer | ConfigInvalid) else f"{type(error).__name__}: "
    return f"{kind}{said}"[:REASON_MAX_CHARS]


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
