"""Memory of the engine child: the allowance, the usage, and the limit that the kernel enforces.

- The agent watches the child and ends it above its limit (`client`). Private memory counts: weights that are mapped
  from files can be dropped by the system at any time.
- An engine on the CPU also limits itself where the system counts private memory (Linux): an allocation then fails
  inside the engine, which samples fewer at once, before the watch has to end it. `RLIMIT_AS` would count reserved
  addresses, of which CUDA takes terabytes; so with a GPU there is only the watch.
"""

import mmap
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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

ASK_TIMEOUT_S = 5.0


def allowed_bytes(policy_bytes: int, free_bytes: int | None, *, held_bytes: int = 0) -> int:
    """Return the memory limit of a child for a policy of `policy_bytes`, while it holds `held_bytes`."""
    by_policy = ANY_POLICY_BYTES + TIMES_THE_POLICY * policy_bytes
    return by_policy if free_bytes is None else min(by_policy, int(SHARE * (free_bytes + held_bytes)))


def resident_bytes(pid: int) -> int | None:
    """Return the private memory of a process, or outside Linux all its memory; None if it has ended."""
    if sys.platform != "linux":
        return resident_by_program(pid)
    pages = _pages(pid)
    return (pages[1] - pages[2]) * mmap.PAGESIZE if pages else None


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


def _children(pid: int) -> list[int]:
    """Return the processes that a program's main thread started; none outside Linux."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def run_within(command: Sequence[str], *, allowed_bytes: int, seconds_max: float) -> int:
    """Run a program that uses a policy, and return its exit code; kill it if it exceeds its limits.

    The memory of its own children counts: they are the ranks of a replay, which end with it.
    """
    deadline = time.monotonic() + seconds_max
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                used_bytes = sum(resident_bytes(each) or 0 for each in (process.pid, *_children(process.pid)))
                if used_bytes > allowed_bytes:
                    raise EngineFailed(
                        f"The program took {used_bytes >> 20} MiB of memory, {allowed_bytes >> 20} are allowed; "
                        "it was stopped."
                    )
                if time.monotonic() > deadline:
                    raise EngineFailed(f"The program took more than {seconds_max:.0f} s and was stopped.")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
        finally:
            process.kill()
    return process.returncode


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
