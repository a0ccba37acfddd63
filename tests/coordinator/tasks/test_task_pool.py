"""Task processes that hang, crash, eat memory or answer nonsense: named, killed, and replaced by sound ones."""

import asyncio
import os
import re
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from coordinator.tasks.reward_functions import STDLIB, Job, error_place
from coordinator.tasks.task_pool import TaskPool, checked
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import VerifierDown, VerifierFailed
from protocol.tasks import Problem, Reward

FUNCTIONS = """
import ctypes, json, os, re, signal, subprocess, sys, time

def fn(completions, **kwargs):
    what = completions[0]
    if os.path.exists(__file__ + ".asked"):
        with open(__file__ + ".asked", "w") as told:
            told.write(what)
    if what == "fine":
        return [float(os.getpid())]
    if what.startswith("has "):
        return [float(what.removeprefix("has ") in os.environ)]
    if what == "spin":
        while True: pass
    if what == "regex":
        re.fullmatch(r"(a+)+b", "a" * 64)
    if what == "sleep":
        time.sleep(10**6)
    if what == "offspring":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
        time.sleep(10**6)
    if what == "memory":
        return [float(len(bytearray(2**34)))]
    if what == "segfault":
        ctypes.string_at(0)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        print("my last words", file=sys.stderr)
        os._exit(3)
    if what == "leave":
        sys.exit("leaving")
    if what == "deep":
        return fn(completions)
    if what == "raise":
        raise LookupError("no such thing")
    if what == "nan":
        return [float("nan")]
    if what == "noise":
        print("x" * 10**7)
        sys.stderr.write("y" * 10**7)
        return [1.0]
    if what == "reads":
        return [float(len(sys.stdin.read()))]
    if what == "pipe":
        for fd in range(3, 20):
            try: os.write(fd, b"\\xff" * 8)
            except OSError: pass
        return [1.0]
"""


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[TaskPool]:
    (tmp_path / "r.py").write_text(FUNCTIONS)
    made = TaskPool(TaskProcessSpec(((f"{tmp_path}/r.py:fn", 1.0),), timeout_s=30.0, processes=1, memory_mib=1024))
    yield made
    await made.close()


def job(what: str) -> Job:
    return Job(Problem("p"), [what], [[1]])


async def pid(pool: TaskPool) -> int:
    """The child that judges now."""
    (reward,) = await pool.judge(job("fine"))
    return int(reward.score)


@pytest.mark.asyncio
async def test_a_child_judges_many_groups(pool: TaskPool) -> None:
    first = await pid(pool)
    assert first != os.getpid()
    assert [await pid(pool) for _ in range(3)] == [first] * 3


@pytest.mark.asyncio
async def test_a_file_that_changes_while_processes_judge_by_it_is_logged_once(
    pool: TaskPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await pid(pool)
    for what, lines in (("segfault", 0), ("segfault", 1), ("segfault", 1)):
        with pytest.raises(VerifierFailed):
            await pool.judge(job(what))  # so that the next question gets another process
        await pid(pool)
        assert len([record for record in caplog.records if record.name == "coordinator.tasks.task_pool"]) == lines
        (tmp_path / "r.py").write_text(FUNCTIONS + "# changed\n")
    assert f"{tmp_path}/r.py has changed since the start" in caplog.text


@pytest.mark.asyncio
async def test_secrets_of_the_operators_environment_are_none_of_a_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.py").write_text(FUNCTIONS)
    there = {"WANDB_API_KEY", "PGPASSWORD", "HF_TOKEN", "JUDGE_KEY", "HF_HOME", "LC_ALL", "PATH"}
    for name in there - {"PATH", "LC_ALL"}:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    place = f"{tmp_path}/r.py:fn"
    pool = TaskPool(TaskProcessSpec(((place, 1.0),), timeout_s=30.0, processes=1, variables=("JUDGE_KEY",)))
    found = {name for name in there if (await pool.judge(job(f"has {name}")))[0].score}
    await pool.close()
    assert found == {"JUDGE_KEY", "HF_HOME", "LC_ALL", "PATH"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("memory", "MemoryError"),
        ("segfault", "SIGSEGV"),
        ("killed", "SIGKILL"),
        ("exit", "code 3. my last words"),
        ("leave", "SystemExit: leaving"),
        ("deep", "RecursionError"),
        ("raise", r"LookupError: no such thing \(r.py:\d+\)"),
        ("nan", "fn returned nan"),
        ("pipe", "bytes; at most 1048576 are allowed|not JSON"),
    ],
)
async def test_a_child_that_fails_is_named_and_replaced(pool: TaskPool, what: str, says: str) -> None:
    before = await pid(pool)
    with pytest.raises(VerifierFailed) as failed:
        await pool.judge(job(what))
    assert re.search(says, failed.value.detail)
    assert not psutil.pid_exists(before)
    assert await pid(pool) != before


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("what", "public"),
    [
        ("raise", r"LookupError \(r.py:\d+\)"),
        ("exit", r"It ended with code 3\."),
        ("leave", r"SystemExit \(r.py:\d+\)"),
    ],
)
async def test_what_a_rewards_code_says_is_not_public(pool: TaskPool, what: str, public: str) -> None:
    """Nodes, pages and the status show the message, and not the detail, which may hold answers."""
    with pytest.raises(VerifierFailed) as failed:
        await pool.judge(job(what))
    assert re.fullmatch(public, failed.value.message)
    assert not re.search("no such thing|my last words|leaving", failed.value.message)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["spin", "regex", "sleep", "offspring"])
async def test_a_child_that_hangs_is_killed_with_all_it_started(tmp_path: Path, what: str) -> None:
    (tmp_path / "r.py").write_text(FUNCTIONS)
    pool = TaskPool(TaskProcessSpec(((f"{tmp_path}/r.py:fn", 1.0),), timeout_s=2.0, processes=1))
    child = psutil.Process(await pid(pool))
    with pytest.raises(VerifierFailed, match=r"did not answer within 2 s \(reward.timeout_s\)"):
        await pool.judge(job(what))
    async with asyncio.timeout(30):
        while any(map(_runs, _session_of(child.pid))):  # noqa: ASYNC110  # a killed process ends a moment later
            await asyncio.sleep(0.05)  # nobody else hears of its end
    await pool.close()


def _session_of(leader: int) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if _session(each.pid) == leader]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session(process: int) -> int:
    try:
        return os.getsid(process)
    except (ProcessLookupError, PermissionError):
        return 0


@pytest.mark.asyncio
async def test_what_functions_print_and_read_harms_nothing(pool: TaskPool) -> None:
    assert await pool.judge(job("noise")) == [Reward(1.0, "ok", {"fn": 1.0})]
    assert await pool.judge(job("reads")) == [Reward(0.0, "ok", {"fn": 0.0})]


def test_an_error_that_no_line_of_the_operator_caused_names_none_of_ours() -> None:
    """Such as of an environment without `reward`: a line of this program or of asyncio leads nowhere."""
    with pytest.raises(ValueError, match="coroutine") as raised:
        asyncio.run(3)  # type: ignore[arg-type]  # an error inside the standard library
    own = raised.value.with_traceback(raised.tb.tb_next)
    assert error_place(own) == ""


def test_an_error_in_an_installed_package_names_its_line_where_packages_lie_below_pythons_library() -> None:
    """The Python of the container is in no virtual environment."""
    reward = compile("1 / 0", f"{STDLIB}/site-packages/rewards/exact.py", "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(reward)
    assert error_place(raised.value.with_traceback(raised.tb.tb_next)) == " (exact.py:1)"


@pytest.mark.asyncio
async def test_functions_that_cannot_be_loaded_are_the_operators_to_mend(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import no_such_library\n")
    pool = TaskPool(TaskProcessSpec(((f"{tmp_path}/r.py:fn", 1.0),)))
    with pytest.raises(VerifierDown, match=r"no_such_library.*r\.py:1"):
        await pool.judge(job("fine"))
    (tmp_path / "r.py").write_text(FUNCTIONS)
    assert await pid(pool)
    await pool.close()


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [[1.0, "ok", {}, 1.0, []], [1.0, "ok", {}, 1.0, []]],
        [[float("nan"), "ok", {}, 1.0, []]],
        [[float("inf"), "ok", {}, 1.0, []]],
        [[1e7, "ok", {}, 1.0, []]],
        [[10**400, "ok", {}, 1.0, []]],
        [["1", "ok", {}, 1.0, []]],
        [[1.0, "verifier_error", {}, 1.0, []]],
        [[1.0, "ok", {"a": "b"}, 1.0, []]],
        [[1.0, "ok", {"a": float("nan")}, 1.0, []]],
        [[1.0, "ok", {str(number): 1.0 for number in range(65)}, 1.0, []]],
        [[1.0, "ok", {}]],
        [[1.0, "ok"]],
        [1.0],
        [[1.0, "ok", {}, float("nan"), []]],
        [[1.0, "ok", {}, -1.0, []]],
        [[1.0, "ok", {}, 101.0, []]],
        [[1.0, "ok", {}, 10**400, []]],
        [[1.0, "ok", {}, "1", []]],
        [[1.0, "ok", {}, 1.0, None]],
        [[1.0, "ok", {}, 1.0, [3]]],
        [[1.0, "ok", {}, 1.0, [[0, 1, 2]]]],
        [[1.0, "ok", {}, 1.0, [[0.0, 1.0]]]],
        [[1.0, "ok", {}, 1.0, [[-1, 2]]]],
        [[1.0, "ok", {}, 1.0, [[2, 2]]]],
        [[1.0, "ok", {}, 1.0, [[0, 10**400]]]],
        [[1.0, "ok", {}, 1.0, [[0, 6]]]],
        [[1.0, "ok", {}, 1.0, [[0, 1]] * 65]],
    ],
)
def test_an_answer_is_not_believed(said: object) -> None:
    with pytest.raises(VerifierFailed):
        checked(said, [5])


def test_what_is_to_be_learned_comes_with_the_reward() -> None:
    assert checked([[0.5, "ok", {}, 2, [[0, 5]]]], [5]) == [Reward(0.5, "ok", weight=2.0, skip=((0, 5),))]


DEADLINE_S = 120

ASKING = """
import asyncio, sys
from coordinator.tasks.reward_functions import Job, error_place
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.sandbox import Sandbox
from protocol.tasks import Problem

async def ask():
    sandbox = Sandbox(writable=(sys.argv[1].rpartition("/")[0],))
    pool = TaskPool(TaskProcessSpec(((sys.argv[1], 1.0),), timeout_s=2.0, processes=1, sandbox=sandbox))
    (reward,) = await pool.judge(Job(Problem("p"), ["fine"], [[1]]))
    print(int(reward.score), flush=True)
    print((await pool.judge(Job(Problem("p"), [sys.argv[2]], [[1]]))), flush=True)

asyncio.run(ask())
"""


@pytest.mark.processes
@pytest.mark.parametrize("what", ["sleep", "regex"])
def test_a_child_that_hangs_ends_though_its_coordinator_was_killed(tmp_path: Path, what: str) -> None:
    """A child that sleeps sees that its parent has ended; the kernel ends one that is stuck in C."""
    (tmp_path / "r.py").write_text(FUNCTIONS)
    os.mkfifo(tmp_path / "r.py.asked")
    asked = os.open(tmp_path / "r.py.asked", os.O_RDWR)  # a writer of its own: it never ends between two questions
    command = [sys.executable, "-P", "-c", ASKING, f"{tmp_path}/r.py:fn", what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        child = psutil.Process(int(asking.stdout.readline()))
        told = b""
        while what.encode() not in told:  # it hangs from now on
            assert select.select([asked], [], [], DEADLINE_S)[0]
            told += os.read(asked, 64)
        asking.kill()
    os.close(asked)
    child.wait(timeout=DEADLINE_S)
