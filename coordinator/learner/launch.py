"""Start and end of all ranks on one machine.

- Ranks get the environment that torchrun would set. torchrun itself opens ports to the whole network and accepts
  pickles from them; these ranks meet by a file and communicate over loopback, so the machine opens no port.
- When a rank fails, the others get SIGTERM and print their stacks, and the launcher ends with the exit code of the
  failed rank. The coordinator restarts it from the last checkpoint, unless the settings were wrong.
- The same ranks replay updates for an auditor and a retraction (`replay`): their stacks would hide the message, so they
  end by their pipe.
- Each rank reads from a pipe of the launcher: when the launcher ends in any way, the ranks end.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

log = logging.getLogger(__name__)

STORE = "SWARM_RANKS_FILE"
"""The variable with the file by which ranks of one machine find each other; ranks of torchrun use its own store."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

GRACE_S = 10.0
"""The time in which the other ranks must end."""

LOST = 6
"""The exit code of a rank of a replay that lost another one: only the launcher sees it."""

KILLED = 128
"""The number that shells add to the number of a signal."""


@dataclass(frozen=True)
class RanksEnd:
    """The end of all ranks."""

    codes: tuple[int, ...]
    """The exit codes by rank; those of signals are negative."""
    failed: int | None
    """The rank that failed by itself; None if none did."""
    said: tuple[str, ...]
    """The last line that each rank printed, if that was kept."""

    @property
    def code(self) -> int:
        """Return the exit code of the rank that failed, as a shell has it, or 0."""
        code = 0 if self.failed is None else self.codes[self.failed]
        return KILLED - code if code < 0 else code


def is_rank() -> bool:
    """Return True if this process was started as one of several ranks."""
    return "RANK" in os.environ


def is_first() -> bool:
    """Return True if this process is rank 0, or alone."""
    return not int(os.environ.get("RANK", 0))


def launch(command: Sequence[str], size: int, store: Path) -> int:
    """Run `command` as `size` ranks that meet at `store`; return the exit code of the first that failed, or 0."""
    store.parent.mkdir(parents=True, exist_ok=True)
    store.unlink(missing_ok=True)
    return _run(command, size, store).code


def replay(command: Sequence[str], size: int) -> RanksEnd:
    """Run `command` as `size` ranks, of which only rank 0 prints; return how they ended."""
    with tempfile.TemporaryDirectory(prefix="echo-swarm-ranks-") as folder:
        return _run(command, size, Path(folder) / "store", said=Path(folder))


def _run(command: Sequence[str], size: int, store: Path, said: Path | None = None) -> RanksEnd:
    shared = {"WORLD_SIZE": str(size), STORE: str(store)}
    shared |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    ranks = []
    with ExitStack() as pipes:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = pipes.enter_context((said / str(rank)).open("wb")) if said and rank else None
            process = Popen(command, stdin=PIPE, stdout=output, env={**os.environ, **shared, **own})
            assert process.stdin
            pipes.enter_context(process.stdin)
            log.info("rank %d started, pid %d", rank, process.pid)
            ranks.append(process)
        failed = _await(ranks, quietly=said is not None)
    if failed is not None and ranks[failed].returncode == LOST:
        failed = next((rank for rank, each in enumerate(ranks) if each.returncode not in (0, LOST)), failed)
    lines = tuple(_last_line(said / str(rank)) if said and rank else "" for rank in range(size))
    return RanksEnd(tuple(process.returncode for process in ranks), failed, lines)


def _await(ranks: Sequence[Popen[bytes]], *, quietly: bool) -> int | None:
    """Wait until all ranks have ended; return the one that failed first, with which the others end."""
    running = {process.pid: rank for rank, process in enumerate(ranks)}
    while running:
        pid, status = os.wait()
        if pid not in running:
            continue
        rank = running.pop(pid)
        ranks[rank].returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            (log.info if quietly else log.error)("rank %d ended with code %d; the others end with it", rank, code)
            _end([ranks[other] for other in running.values()], quietly=quietly)
            return rank
    return None


def _end(processes: Sequence[Popen[bytes]], *, quietly: bool) -> None:
    """End the processes: send SIGTERM, or close their pipes, wait up to `GRACE_S`, then kill those that still run."""
    for process in processes:
        if quietly and process.stdin:
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""
