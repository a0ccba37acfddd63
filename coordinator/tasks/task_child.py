"""A task process: it loads the operator's functions or environment, then answers one question at a time.

- The functions' output goes to standard error, of which the coordinator keeps the end.
- Its memory, and its processor time for each question, are limited: the kernel ends it at the limit, even after the
  coordinator has ended.
- It enters its sandbox before it loads anything of the operator's.
- A function that can judge nothing for now, such as a judge without a budget, raises `VerifierDown`: the group waits.
- It ends with the coordinator, at any time.
"""

import json
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from coordinator.environments.host import EpisodeHost, TurnQuestion
from coordinator.tasks import reward_functions, sandbox
from coordinator.tasks.problem_file import from_value
from coordinator.tasks.reward_functions import Job, Weighted
from coordinator.tasks.task_process import LENGTH, pack, reward_to
from protocol.errors import ConfigInvalid, VerifierDown

START_CPU_S = 120
"""The processor time for the imports of the functions; torch needs a tenth of it."""

PARENT_CHECK_S = 0.5
"""The interval at which a thread checks for the parent: not every system signals its death."""

REASON_MAX_CHARS = 400

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one question."""


def main() -> None:
    parent = os.getppid()
    questions, answers = _own_pipes()
    settings = _receive(questions)
    _limit(settings["memory_mib"])
    environment = settings["environment"]
    places = [environment[0]] if environment else [place for place, _ in settings["functions"]]
    missing = sandbox.enter(settings["sandbox"], places) if settings["sandbox"] else []
    threading.Thread(target=_leave_after, args=(parent,), daemon=True).start()
    try:
        answer = _loaded(settings)
    except ConfigInvalid as error:
        _send(answers, {"error": error.message, "hint": error.hint})
        return
    except BaseException as error:  # reported to the operator
        _send(answers, {"error": _described(error)["detail"]})
        return
    _send(answers, {"ready": True, "missing": missing})
    while True:
        _send(answers, _answer(answer, _receive(questions)))


def _loaded(settings: dict[str, Any]) -> Answer:
    """Return the function that answers questions, after loading the operator's code."""
    if settings["environment"]:
        place, parameters = settings["environment"]
        host = EpisodeHost(reward_functions.load_callable(place), parameters)
        return lambda question: {"episodes": _play(host, question)}
    loaded = [reward_functions.load(place, weight) for place, weight in settings["functions"]]
    return lambda question: {"rewards": _judge(loaded, question)}


def _judge(loaded: list[Weighted], question: dict[str, Any]) -> list[Any]:
    job = Job(from_value(question["problem"]), question["completions"], question["tokens"])
    return [reward_to(reward) for reward in reward_functions.judge(loaded, job)]


def _play(host: EpisodeHost, question: dict[str, Any]) -> list[Any]:
    asked = TurnQuestion(question["key"], from_value(question["problem"]), question["turns"], question["over"])
    return [
        {
            "read": [reward_functions.observed(each) for each in said.read],
            "reward": None if said.earned is None else reward_to(reward_functions.earned(said.earned)),
        }
        if said
        else None
        for said in host.play(asked)
    ]


def _answer(answer: Answer, question: dict[str, Any]) -> dict[str, Any]:
    _allow_cpu(question["timeout_s"])
    try:
        return answer(question)
    except VerifierDown as down:
        return {"down": down.message, "hint": down.hint}
    except BaseException as error:  # any error of the operator's code is the answer
        return _described(error)


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


def _described(error: BaseException) -> dict[str, str]:
    """Return the kind and place of an error, which are public, and both with its message, for the operator."""
    place = ""
    with suppress(Exception):  # the exception object may itself be broken
        if not isinstance(error, reward_functions.BadAnswer):
            place = reward_functions.error_place(error)
    place += sandbox.explained(error)
    is_ours = isinstance(error, reward_functions.BadAnswer | ConfigInvalid)
    kind, message = type(error).__name__, f"{error}{place}"
    public, detail = (message, message) if is_ours else (f"{kind}{place}", f"{kind}: {message}")
    return {"error": public[:REASON_MAX_CHARS], "detail": detail[:REASON_MAX_CHARS]}


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
