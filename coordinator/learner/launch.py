"""Start and end of all ranks on one machine.

- Ranks get the environment that torchrun would set. torchrun itself opens ports to the whole network and accepts
  pickles from them; these ranks meet by a file and communicate over loopback, so the machine opens no port.
- When a rank fails, the others get SIGTERM and print their stacks, and the launcher ends with the exit code of the
  failed rank. The coordinator restarts it from the last checkpoint, unless the settings were wrong.
- Each rank reads from a pipe of the launcher: when the launcher ends in any way, the ranks end.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from coordinator.config import Config

log = logging.getLogger(__name__)

STORE = "SWARM_RANKS_FILE"
"""The variable with the file by which ranks of one machine find each other; ranks of torchrun use its own store."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

GRACE_S = 10.0
"""The time in which the other ranks must end."""

KILLED = 128
"""The number that shells add to the number of a signal."""


def is_rank() -> bool:
    """Return True if this process was started as one of several ranks."""
    return "RANK" in os.environ


def launch(command: Sequence[str], config: Config) -> int:
    """Run `command` as `learner.processes` ranks; return the exit code of the first that failed, or 0."""
    store = config.round.directory / "learner" / "ranks"
    store.parent.mkdir(parents=True, exist_ok=True)
    store.unlink(missing_ok=True)
    size = config.learner.processes
    shared = {"WORLD_SIZE": str(size), STORE: str(store)}
    shared |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    ranks = {}
    with ExitStack() as pipes:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **shared, **own})
            assert process.stdin
            pipes.enter_context(process.stdin)
            log.info("rank %d started, pid %d", rank, process.pid)
            ranks[process.pid] = (rank, process)
        return _await(ranks)


def _await(ranks: dict[int, tuple[int, subprocess.Popen[bytes]]]) -> int:
    while ranks:
        pid, status = os.wait()
        if pid not in ranks:
            continue
        rank, process = ranks.pop(pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.error("rank %d ended with code %d; the others end with it", rank, process.returncode)
            _end([other for _, other in ranks.values()])
            return KILLED - process.returncode if process.returncode < 0 else process.returncode
    return 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to the processes, wait up to `GRACE_S`, then kill those that still run."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
