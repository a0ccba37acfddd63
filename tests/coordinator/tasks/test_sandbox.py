"""Reward functions that attack the coordinator's machine: each attack is named, costs its own group, and no other."""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from coordinator.config import load
from coordinator.tasks import sandbox
from coordinator.tasks.kinds import ENVIRONMENTS, process_spec
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.sandbox_kernel import READ, READ_FOLDER
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import VerifierDown, VerifierFailed
from protocol.tasks import Problem, Reward

PARTS = """
import os
from coordinator.tasks import sandbox_kernel
"""


def in_python(code: str) -> str:
    """Run code that enters parts of a sandbox by itself, and return what it prints."""
    made = subprocess.run([sys.executable, "-P", "-c", PARTS + code], capture_output=True, text=True, check=True)
    return made.stdout.strip()


NAMESPACES = """
try:
    if os.geteuid():
        sandbox_kernel.enter_user_namespace()
    sandbox_kernel.enter_mount_namespace()
    print("permitted")
except OSError:
    pass
"""

pytestmark = pytest.mark.skipif(bool(sandbox.missing_here()), reason="the kernel lacks parts of the sandbox")

HOSTILE = """
import ctypes, multiprocessing, os, shutil, socket, subprocess, sys, tempfile, threading, time

libc = ctypes.CDLL(None, use_errno=True)

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def fn(completions, **columns):
    what, _, where = completions[0].partition(" ")
    globals()[what](where)
    return [1.0]

def fine(where):
    with tempfile.TemporaryDirectory() as folder:
        with open(folder + "/a", "w") as file:
            file.write("scratch")
        shutil.copy(folder + "/a", folder + "/b")
        os.rename(folder + "/a", folder + "/c")
    subprocess.run([sys.executable, "-c", "import json, hashlib, ssl"], check=True)
    assert open(os.path.dirname(__file__) + "/data.txt").read() == "mine"

def fork_bomb(where):
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(10**6)

def thread_bomb(where):
    for _ in range(100):
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()

def leave_session(where):
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError(os.waitstatus_to_exitcode(status), "setsid")

def tcp(where):
    socket.create_connection(("127.0.0.1", int(where)), timeout=10)

def listen(where):
    with socket.create_server((where, 0)) as server, socket.create_connection(server.getsockname(), timeout=10):
        server.accept()

def listen_at(where):
    socket.create_server(("127.0.0.1", int(where))).close()

def udp(where):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(where)))

def unix(where):
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(where.replace("@", chr(0)))

def swallowed(where):
    try:
        tcp(where)
    except OSError as error:
        raise ValueError("no judge")
    raise ValueError("a judge")

def memory(where):
    bytearray(10**10)

def read(where):
    with open(where, "rb") as file:
        file.read(1)

def parent(where):
    read(f"/proc/{os.getppid()}/{where}")

def write_memory(where):
    path = f"/proc/{os.getppid()}/mem"
    os.open(path, os.O_RDWR)

def ptrace(where):
    check(libc.ptrace(0x4206, os.getppid(), 0, 0))

def read_memory(where):
    class Part(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    part = Part(0, 0)
    check(libc.process_vm_readv(os.getppid(), ctypes.byref(part), 1, ctypes.byref(part), 1, 0))

def signal(where):
    os.kill(os.getppid(), 0)

def lower_limits(where):
    import resource
    resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))

def slow_down(where):
    os.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid()))

def link(where):
    path = tempfile.mktemp()
    os.symlink(where, path)
    read(path)

def hard_link(where):
    os.link(where, tempfile.mktemp())

def write(where):
    with open(where, "w") as file:
        file.write("x")

def change_mode(where):
    os.chmod(where, 0o777)

def remove(where):
    os.remove(where)

def loud(where):
    for _ in range(1000):
        print("x" * 10**6)

def big_file(where):
    with tempfile.TemporaryFile() as file:
        for _ in range(64):
            file.write(bytes(2**20))

def many_files(where):
    files = [tempfile.TemporaryFile() for _ in range(64)]
    for file in files:
        file.write(bytes(2**20))
        file.flush()

def hidden_memory(where):
    check(libc.memfd_create(b"x", 0))

def namespaces(where):
    check(libc.unshare(0x10000000))
"""

SECRET = "secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The operator's folder, with the round in it."""
    (tmp_path / "r.py").write_text(HOSTILE)
    (tmp_path / "data.txt").write_text("mine")
    (tmp_path / "round" / "keys").mkdir(parents=True)
    for name in ("round/keys/operator.key", "round/task.txt", ".env", "evm.key"):
        (tmp_path / name).write_text(SECRET)
    return tmp_path


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The addresses of listeners outside the sandbox."""
    with ExitStack() as stack:
        listeners = {"tcp": stack.enter_context(socket.create_server(("127.0.0.1", 0)))}
        for name, where in (("unix", f"{tmp_path}/socket"), ("abstract", f"\0swarm-test-{os.getpid()}")):
            listeners[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            listeners[name].bind(where)
            listeners[name].listen()
        names = {name: str(each.getsockname()) for name, each in listeners.items() if name == "unix"}
        yield names | {
            "tcp": str(listeners["tcp"].getsockname()[1]),
            "abstract": f"@swarm-test-{os.getpid()}",
        }


def spec(folder: Path, rules: Sandbox | None) -> TaskProcessSpec:
    return TaskProcessSpec(
        ((f"{folder}/r.py:fn", 1.0),), timeout_s=60.0, processes=1, memory_mib=2048, sandbox=rules
    )  # fmt: skip


def rules(folder: Path, **changes: object) -> Sandbox:
    hidden = (f"{folder}/round", f"{folder}/evm.key")
    settings = {"hidden": hidden, "processes_max": 32, "scratch_mib": 16} | changes
    return Sandbox(**settings)  # type: ignore[arg-type]  # of any type


@pytest_asyncio.fixture
async def pool(folder: Path) -> AsyncIterator[TaskPool]:
    made = TaskPool(spec(folder, rules(folder)))
    yield made
    await made.close()


def job(what: str) -> Job:
    return Job(Problem("p"), [what], [[1]])


FINE = [Reward(1.0, "ok", {"fn": 1.0})]

FILES = "only Python, the function's folder and reward.readable can be read"
NETWORK = "the network is forbidden; reward.network"
FULL = "the scratch folder is full; reward.scratch_mib"
PROCESSES = "reward.processes_max"
CALL = "this system call is forbidden"
KILLED = "SIGSYS. It made a system call that the sandbox forbids"

ATTACKS = {
    "processes": [("fork_bomb", PROCESSES), ("thread_bomb", PROCESSES), ("leave_session", CALL)],
    "network": [
        ("tcp {tcp}", NETWORK), ("udp {tcp}", NETWORK), ("unix {unix}", NETWORK), ("unix {abstract}", NETWORK),
        ("swallowed {tcp}", NETWORK),
    ],
    "memory": [("memory", "reward.memory_mib"), ("hidden_memory", CALL)],
    "secrets": [
        ("read {folder}/round/keys/operator.key", FILES), ("read {folder}/round/task.txt", FILES),
        ("read {folder}/.env", FILES), ("read {folder}/evm.key", FILES), ("read {elsewhere}", FILES),
        ("read /etc/shadow", FILES),
    ],
    "coordinator": [
        ("parent environ", FILES), ("parent mem", FILES), ("parent cmdline", FILES), ("write_memory", FILES),
        ("ptrace", KILLED), ("read_memory", KILLED), ("signal", CALL), ("lower_limits", CALL), ("slow_down", CALL),
    ],
    "links": [
        ("read {folder}/link", FILES), ("link {elsewhere}", FILES), ("link {folder}/round/keys/operator.key", FILES),
        ("hard_link {folder}/data.txt", FILES),
    ],
    "writing": [
        ("write {folder}/new.txt", FILES), ("write {folder}/r.py", FILES), ("write {elsewhere}", FILES),
        ("remove {folder}/data.txt", FILES), ("change_mode {folder}/r.py", FILES),
    ],
    "flood": [("loud", "It printed more than 64 MiB"), ("big_file", FULL), ("many_files", FULL)],
    "namespaces": [("namespaces", CALL)],
}  # fmt: skip


@pytest.fixture
def places(folder: Path, ports: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    elsewhere.write_text(SECRET)
    (folder / "link").symlink_to(elsewhere)
    return ports | {"folder": str(folder), "elsewhere": str(elsewhere)}


NEED_NAMESPACES = {"many_files", "change_mode {folder}/r.py"}


@pytest.mark.asyncio
@pytest.mark.parametrize("target", ATTACKS)
async def test_an_attack_is_named_and_costs_one_group(pool: TaskPool, places: dict[str, str], target: str) -> None:
    permitted = in_python(NAMESPACES)
    for attack, says in ATTACKS[target]:
        if attack in NEED_NAMESPACES and not permitted:
            continue
        with pytest.raises(VerifierFailed) as failure:
            await pool.judge(job(attack.format(**places)))
        assert says in failure.value.message, attack
        assert await pool.judge(job("fine")) == FINE, attack
    assert not [each for each in psutil.process_iter() if _sleeps_for_ever(each)]


def _sleeps_for_ever(process: psutil.Process) -> bool:
    """Return True for a task process that is left over: one without a coordinator."""
    try:
        return "coordinator.tasks.task_child" in process.cmdline() and process.ppid() == 1
    except psutil.Error:
        return False


SYSTEM_MAY_FORBID = {
    "read /etc/shadow", "hard_link {folder}/data.txt", "namespaces",
    "ptrace", "read_memory", "parent mem", "write_memory",
}  # fmt: skip
"""The attacks that some systems forbid without a sandbox: to other users than root, or by Yama."""

OTHERWISE_LIMITED = {"memory", "loud", "swallowed {tcp}"}


@pytest.mark.asyncio
async def test_the_attacks_succeed_without_a_sandbox(folder: Path, places: dict[str, str]) -> None:
    pool = TaskPool(spec(folder, None))
    try:
        for attack in (attack for attacks in ATTACKS.values() for attack, _ in attacks):
            if attack not in SYSTEM_MAY_FORBID | OTHERWISE_LIMITED:
                assert await pool.judge(job(attack.format(**places))) == FINE, attack
    finally:
        await pool.close()


def test_the_settings_of_a_round_reach_the_sandbox(folder: Path) -> None:
    config = load(
        None,
        [
            f"task.name={folder}/r.py", f"round.directory={folder}/round", f"payouts.evm_key={folder}/evm.key",
            "reward.network=true", 'reward.readable=["/data/judge"]', "reward.processes_max=7", "reward.scratch_mib=9",
        ],
    )  # fmt: skip
    made = process_spec(config).sandbox
    assert made is not None
    assert (made.network, made.readable, made.processes_max, made.scratch_mib) == (True, ("/data/judge",), 7, 9)
    assert {f"{folder}/round", f"{folder}/evm.key"} <= set(made.hidden)
    assert not made.listening


def test_only_environments_whose_parts_are_servers_may_listen() -> None:
    granted = {
        name
        for name in ENVIRONMENTS
        if (made := process_spec(load(None, [f"task.name={name}", "reward.network=true"])).sandbox) and made.listening
    }
    assert granted == {"verifiers"}
    alone = process_spec(load(None, ["task.name=verifiers"])).sandbox
    assert alone is not None
    assert not alone.listening


def test_a_gap_is_logged_once_with_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    logged = {sandbox.NO_FILTER}
    sandbox.log_gaps([sandbox.NO_MOUNTS, sandbox.NO_MOUNTS, sandbox.NO_FILTER, "nonsense", 7], logged)
    sandbox.log_gaps({"an": "answer"}, logged)
    assert logged == {sandbox.NO_FILTER, sandbox.NO_MOUNTS}
    (said,) = (record.getMessage() for record in caplog.records)
    assert "not their sum. Permit user namespaces" in said


def test_a_mode_is_not_changed_where_mounts_cannot_be_read_only(tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    in_python(
        "sandbox_kernel.forbid_new_privileges()\n"
        "sandbox_kernel.install_filter(sandbox_kernel.filter_program(network=False, modes=False))\n"
        f"os.chmod({str(tmp_path / 'key')!r}, 0o644)\n"
        f"os.utime({str(tmp_path / 'key')!r}, (1, 1))\n"
    )
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "key").stat().st_mtime > 1


@pytest.mark.asyncio
async def test_granted_network_reaches_a_judge_but_no_socket_of_the_machine(
    folder: Path, places: dict[str, str]
) -> None:
    pool = TaskPool(spec(folder, rules(folder, network=True)))
    try:
        assert await pool.judge(job(f"tcp {places['tcp']}")) == FINE
        for where in (places["unix"], places["abstract"]):
            with pytest.raises(VerifierFailed, match="Unix sockets stay forbidden"):
                await pool.judge(job(f"unix {where}"))
    finally:
        await pool.close()


@pytest.mark.asyncio
async def test_a_process_listens_only_where_that_is_granted_and_only_on_a_port_that_the_kernel_chooses(
    folder: Path,
) -> None:
    pool = TaskPool(spec(folder, rules(folder, network=True)))
    with pytest.raises(VerifierFailed, match=CALL):
        await pool.judge(job("listen 127.0.0.1"))
    await pool.close()
    pool = TaskPool(spec(folder, rules(folder, network=True, listening=True)))
    try:
        assert await pool.judge(job("listen 127.0.0.1")) == FINE
        with socket.create_server(("127.0.0.1", 0)) as taken:
            free = taken.getsockname()[1]
        with pytest.raises(VerifierFailed, match=CALL):
            await pool.judge(job(f"listen_at {free}"))
    finally:
        await pool.close()


@pytest.mark.asyncio
async def test_granted_paths_can_be_read_and_written(folder: Path, places: dict[str, str]) -> None:
    elsewhere = Path(places["elsewhere"])
    pool = TaskPool(spec(folder, rules(folder, readable=(str(elsewhere),))))
    assert await pool.judge(job(f"read {elsewhere}")) == FINE
    with pytest.raises(VerifierFailed, match=r"reward\.writable"):
        await pool.judge(job(f"write {elsewhere}"))
    await pool.close()
    pool = TaskPool(spec(folder, rules(folder, writable=(str(elsewhere.parent),))))
    assert await pool.judge(job(f"write {elsewhere.parent}/new.txt")) == FINE
    assert await pool.judge(job(f"read {elsewhere.parent}/new.txt")) == FINE
    await pool.close()
    assert (elsewhere.parent / "new.txt").read_text() == "x"


@pytest.mark.asyncio
async def test_code_that_attacks_when_it_is_loaded_is_in_the_sandbox_already(folder: Path) -> None:
    (folder / "r.py").write_text(HOSTILE + f'\nread("{folder}/round/keys/operator.key")\n')
    pool = TaskPool(spec(folder, rules(folder)))
    with pytest.raises(VerifierDown, match=r"Permission denied.*reward\.readable"):
        await pool.judge(job("fine"))


@pytest.mark.asyncio
async def test_the_scratch_folder_is_removed_with_its_process(folder: Path) -> None:
    pool = TaskPool(spec(folder, rules(folder)))
    assert await pool.judge(job("fine")) == FINE
    (child,) = [place.child for place in pool._places if place.child]
    assert child._scratch.is_dir()
    await pool.close()
    assert not child._scratch.exists()


def _granted(places: list[str], hidden: list[Path], home: Path, readable: tuple[str, ...] = ()) -> dict[Path, int]:
    environment = {"HOME": str(home)}
    return dict(sandbox.readable_paths(places, readable, (), [str(each) for each in hidden], environment))


def test_a_function_in_the_rounds_folder_does_not_open_that_folder(folder: Path) -> None:
    (folder / "round" / "mine.py").touch()
    granted = _granted([f"{folder}/round/mine.py:fn"], [folder / "round"], folder.parent / "nobody")
    assert granted[folder / "round" / "mine.py"] == READ
    assert not {path for path in granted if path.is_relative_to(folder)} - {folder / "round" / "mine.py"}


def test_a_function_in_the_home_folder_does_not_open_its_secrets(folder: Path) -> None:
    (folder / ".ssh").mkdir()
    (folder / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "token").write_text(SECRET)
    granted = _granted([f"{folder}/r.py:fn"], [folder / "round"], folder)
    inside = {path.relative_to(folder): rights for path, rights in granted.items() if path.is_relative_to(folder)}
    assert {str(path) for path, rights in inside.items() if rights == READ and (folder / path).exists()} == {
        "r.py", "data.txt", "evm.key", ".cache/huggingface/hub",
    }  # fmt: skip
    assert inside[Path()] == READ_FOLDER


def test_the_rounds_folder_is_not_readable_though_a_setting_names_it_or_a_folder_around_it(folder: Path) -> None:
    granted = _granted([], [folder / "round"], folder.parent / "nobody", (str(folder), f"{folder}/round"))
    assert not {path for path in granted if path.is_relative_to(folder / "round")}
    assert granted[folder / "data.txt"] == READ
