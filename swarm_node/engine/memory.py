"""Memory of the engine child: the allowance, the usage, and the limit that the kernel enforces.

- The agent watches the child and ends it above its limit (`client`). Private memory counts: weights that are mapped
  from files can be dropped by the system at any time.
- An engine on the CPU also limits itself where the system counts private memory (Linux): an allocation then fails
  inside the engine, which samples fewer at once, before the watch has to end it. `RLIMIT_AS` would count reserved
  addresses, of which CUDA takes terabytes; so with a GPU there is only the watch.
"""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from protocol import limits
from protocol.errors import EngineFailed

LOOK_S = 0.1
"""Pause between two checks of the child. A malicious tokenizer allocates 1.7 GB per second."""

LOOK_BY_PROGRAM_S = 1.0
"""The pause where each check starts a program."""

SHARE = 0.85
"""Share of the free memory and of the child's current memory; the rest is left to the owner."""

ANY_POLICY_BYTES = 8 * 1024 * limits.MIB
"""Memory for the libraries of an engine, and the samples of a small policy; torch with CUDA takes 3 GB."""

TIMES_THE_POLICY = 32
"""Factor for weights in float32, a converted copy, and the keys and values of many samples."""

RANK_BYTES = 3 * 1024 * limits.MIB
"""Memory for the libraries of each further rank of a replay, or worker of an engine with several cards."""

RANKS_MAX = 64
"""No replay has more ranks (`learner.processes`)."""

ASK_TIMEOUT_S = 5.0

NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SWARM_RANKS_FILE")
"""Variables of shells that torchrun started: with them, a program would be one of several ranks."""


def allowed_bytes(policy_bytes: int, free_bytes: int | None, *, held_bytes: int = 0, ranks: int = 1) -> int:
    """Return the memory limit of a child for a policy of `policy_bytes`, while it holds `held_bytes`.

    A child that starts several `ranks`, or workers for as many cards, shares the limit with them.
    """
    further = min(max(ranks, 1), RANKS_MAX) - 1
    by_policy = ANY_POLICY_BYTES + further * RANK_BYTES + TIMES_THE_POLICY * policy_bytes
    return by_policy if free_bytes is None else min(by_policy, int(SHARE * (free_bytes + held_bytes)))


def resident_bytes(pid: int) -> int | None:
    """Return the private memory of a process, or outside Linux all its memory; None if it has ended."""
    if sys.platform != "linux":
        return resident_by_program(pid)
    pages = _pages(pid)
    return (pages[1] - pages[2]) * mmap.PAGESIZE if pages else None


def tree_bytes(pid: int) -> int | None:
    """Return the memory of a process and of those that its main thread started; None if it has ended."""
    own_bytes = resident_bytes(pid)
    return None if own_bytes is None else own_bytes + sum(resident_bytes(each) or 0 for each in _children(pid) or ())


def resident_by_program(pid: int) -> int | None:
    """Return the resident memory of a process by `ps`; None if the process has ended, or `ps` is missing."""
    try:
        done = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stdout.strip()
    return int(said) * 1024 if said.isdigit() else None


def _children(pid: int) -> list[int] | None:
    """Return the processes that a program's main thread started; None where the system does not list them."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return None
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def group_by_program(group: int) -> int | None:
    """Return the resident memory of a process group by `ps`; None if `ps` is missing or fails."""
    try:
        done = subprocess.run(["ps", "-axo", "pgid=,rss="], capture_output=True, timeout=ASK_TIMEOUT_S, check=True)
        rows = [line.split() for line in done.stdout.decode().splitlines()]
        return 1024 * sum(int(row[1]) for row in rows if int(row[0]) == group)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _used_bytes(leader: int) -> int:
    """Return the memory of a program and its children, which are one process group."""
    children = _children(leader)
    if children is not None:
        return tree_bytes(leader) or 0
    used_bytes = group_by_program(leader)
    if used_bytes is None:
        raise EngineFailed("The memory of the program cannot be watched here: `ps` failed. It was stopped.")
    return used_bytes


def run_within(command: Sequence[str], *, allowed_bytes: int, seconds_max: float) -> int:
    """Run a program that uses a policy, and return its exit code; kill it if it exceeds its limits.

    - Its children are the ranks of a replay: their memory counts, and they are killed with it, whatever they do then.
    - It gets no input, so that no shell's can end it, and a folder for temporary files, which is removed.
    """
    deadline = time.monotonic() + seconds_max
    pause_s = LOOK_BY_PROGRAM_S if _children(os.getpid()) is None else LOOK_S
    with (
        _ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="echo-swarm-replay-", ignore_cleanup_errors=True) as place,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED} | {"TMPDIR": place},
            process_group=0,
        ) as process,
    ):
        try:
            while process.poll() is None:
                used_bytes = _used_bytes(process.pid)
                if used_bytes > allowed_bytes:
                    raise EngineFailed(
                        f"The program took {used_bytes >> 20} MiB of memory, {allowed_bytes >> 20} are allowed; "
                        "it was stopped."
                    )
                if time.monotonic() > deadline:
                    raise EngineFailed(f"The program took more than {seconds_max:.0f} s and was stopped.")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(pause_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left, or only zombies (macOS)
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise `SystemExit` in this block at signals that would end this process and leave its child to itself."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def growth_limited(more_bytes: int) -> Iterator[None]:
    """Limit this process to `more_bytes` of additional private memory for the duration of the block.

    A lower limit stays. Where the kernel does not count private memory, there is no limit.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = _pages("self")
    wanted = more_bytes + (pages[5] * mmap.PAGESIZE if pages else 0)
    lower = min([wanted, *(limit for limit in (before, hard) if limit != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def limit_private(size_bytes: int) -> None:
    """Limit this process to `size_bytes` of private memory from now on, where the kernel counts it."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes if hard < 0 else min(size_bytes, hard), hard))


def _pages(process: int | str) -> list[int]:
    """Return the page counts of a process: total, resident, resident from files, code, 0, private, 0."""
    try:
        return [int(number) for number in Path(f"/proc/{process}/statm").read_text().split()]
    except (OSError, ValueError):
        return []
