"""The memory that an engine child may have, and the memory that it has."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from protocol import limits
from protocol.errors import EngineFailed
from swarm_node.engine import memory


def test_memory_is_allowed_by_the_policy_and_by_what_the_machine_has() -> None:
    giga = 1024 * limits.MIB
    assert memory.allowed_bytes(4 * limits.MIB, 256 * giga) < 9 * giga, "a small policy takes no large machine"
    assert memory.allowed_bytes(16 * giga, 100 * giga) == int(0.85 * 100 * giga)
    assert memory.allowed_bytes(16 * giga, 10 * giga, held_bytes=90 * giga) == int(0.85 * 100 * giga), "its own counts"
    assert memory.allowed_bytes(giga, None) == 40 * giga
    assert memory.allowed_bytes(giga, None, ranks=4) == 49 * giga
    assert memory.allowed_bytes(giga, None, ranks=10**30) == memory.allowed_bytes(giga, None, ranks=64)
    assert memory.resident_by_program(os.getpid()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert memory.resident_by_program(2**22 + 1) is memory.resident_bytes(2**22 + 1) is None


LIMITED = """
from swarm_node.engine import memory
kept = bytearray(50 * 2**20)
memory.limit_private(400 * 2**20)
with memory.growth_limited(20 * 2**20):
    try:
        bytearray(40 * 2**20)
    except MemoryError:
        print("no more within the block")
also = bytearray(100 * 2**20)
try:
    bytearray(300 * 2**20)
except MemoryError:
    print("no more at all")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel counts private memory")
def test_the_kernel_refuses_what_a_child_may_not_have() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["no more within the block", "no more at all"]


CHILD_GROWS = "kept = [bytearray(b'9' * 2**24) for _ in range(30)]; import sys; sys.stdin.read()"
STAYS = "kept = [bytearray(b'9' * 2**24) for _ in range(30)]; import signal; signal.pause()"
SAYS_WHEN_FULL = CHILD_GROWS.replace("import sys", "import sys; print('full', flush=True)")
GROWS = "kept = []\nwhile True: kept.append(bytearray(b'9' * 2**24))"


def test_a_replay_that_takes_too_much_memory_or_time_is_stopped_and_named() -> None:
    """`swarm-node why --replay` uses the versions of a round in a program of its own."""
    before = memory.resident_bytes(os.getpid()) or 0
    with pytest.raises(EngineFailed, match=r"took \d+ MiB of memory, 300 are allowed; it was stopped"):
        memory.run_within([sys.executable, "-c", GROWS], allowed_bytes=300 * limits.MIB, seconds_max=600.0)
    if sys.platform == "linux":
        parent = (
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD_GROWS!r}], stdin=subprocess.PIPE)"
        )
        with pytest.raises(EngineFailed, match=r"took \d+ MiB of memory, 300 are allowed; it was stopped"):
            memory.run_within([sys.executable, "-c", parent], allowed_bytes=300 * limits.MIB, seconds_max=60.0)
    endless = [sys.executable, "-c", "while True: pass"]
    with pytest.raises(EngineFailed, match="took more than 1 s and was stopped"):
        memory.run_within(endless, allowed_bytes=300 * limits.MIB, seconds_max=1.0)
    assert memory.run_within([sys.executable, "-c", "exit(3)"], allowed_bytes=2**30, seconds_max=600.0) == 3
    assert (memory.resident_bytes(os.getpid()) or 0) - before < 64 * limits.MIB


DEAF = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); signal.pause()"
LEAVES = f"""
import os, subprocess, sys
deaf = subprocess.Popen([sys.executable, '-c', {DEAF!r}])
print(deaf.pid, os.environ['TMPDIR'], os.environ.get('RANK'), repr(sys.stdin.read()), flush=True)
open(os.environ['TMPDIR'] + '/store', 'w')
"""


@pytest.mark.parametrize("then", ["while True: pass", "os.kill(os.getpid(), 9)", "pass"])
def test_ranks_that_do_not_listen_end_with_the_replay_that_started_them(
    then: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code of a hostile tokenizer holds the interpreter's lock: such a rank does not see its input close."""
    monkeypatch.setenv("RANK", "0")
    with suppress(EngineFailed):
        memory.run_within([sys.executable, "-c", LEAVES + then], allowed_bytes=2**30, seconds_max=2.0)
    pid, folder, rank, words = capfd.readouterr().out.split()
    assert (rank, words) == ("None", "''")
    assert not Path(folder).exists()
    gone, _ = psutil.wait_procs([psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=5.0)
    assert gone or not psutil.pid_exists(int(pid))


def test_where_no_kernel_lists_children_the_group_is_counted_or_the_replay_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_children", lambda _pid: None)  # as on macOS
    used_bytes = memory.group_by_program(os.getpgrp())
    assert used_bytes is not None
    assert used_bytes > 0.8 * psutil.Process().memory_info().rss
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STAYS!r}])"
    with pytest.raises(EngineFailed, match=r"took \d+ MiB of memory, 300 are allowed; it was stopped"):
        memory.run_within([sys.executable, "-c", child], allowed_bytes=300 * limits.MIB, seconds_max=60.0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineFailed, match="cannot be watched here"):
        memory.run_within([sys.executable, "-c", "while True: pass"], allowed_bytes=2**40, seconds_max=60.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no engine has workers")
def test_the_workers_of_a_child_count_as_its_memory() -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAYS_WHEN_FULL!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"full\n"
        own_bytes, all_bytes = memory.resident_bytes(child.pid), memory.tree_bytes(child.pid)
        assert own_bytes is not None
        assert all_bytes is not None
        assert own_bytes < 100 * limits.MIB < 480 * limits.MIB < all_bytes
        assert child.stdin is not None
        child.stdin.close()
    assert memory.tree_bytes(2**22 + 1) is None
