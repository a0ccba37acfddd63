"""Start and end of all ranks on one machine.

- Ranks get the environment that torchrun would set. torchrun itself opens ports to the whole network and accepts
  pickles from them; these ranks meet by a file and communicate over loopback, so the machine opens no port.
- When a rank fails, the others get SIGTERM and print their stacks, and the launcher ends with the exit code of the
  failed rank. The coordinator restarts it from the last checkpoint, unless the settings were wrong.
- The same ranks replay updates for an auditor and a retraction (`run_quietly`). Stacks would hide their message, so no
  rank gets SIGTERM: each may end by itself for a while, then rank 0 is interrupted, then all pipes close.
- Each rank reads from a pipe of the launcher: when the launcher ends in any way, the ranks end.
- `RANK` alone makes no rank of a replay: shells of torchrun and of PyTorchJob have it, too.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from protocol.text.plain import one_line

log = logging.getLogger(__name__)

STORE = "SWARM_RANKS_FILE"
"""The variable with the file by which ranks of one machine find each other; ranks of torchrun use its own store."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", STORE)
"""The variables that make a process one of several ranks."""

GRACE_S = 10.0
"""The time in which the other ranks must end."""

LOST = 6
"""The exit code of a rank of a replay that lost another one, or its launcher."""

KILLED = 128
"""The number that shells add to the number of a signal."""


@dataclass(frozen=True)
class RanksEnd:
    """The end of all ranks."""

    codes: tuple[int, ...]
    """The exit codes by rank; those of signals are negative."""
    failed: int | None
    """The rank that failed by itself; None if none did."""
    last_lines: tuple[str, ...]
    """The last line that each rank printed, if that was kept."""

    @property
    def code(self) -> int:
        """Return the exit code of the rank that failed, as a shell has it, or 0."""
        code = 0 if self.failed is None else self.codes[self.failed]
        return KILLED - code if code < 0 else code


def is_rank() -> bool:
    """Return True if this process was started as one of several ranks."""
    return "RANK" in os.environ


def is_launched() -> bool:
    """Return True if this module started this process as one of several ranks."""
    return STORE in os.environ


def forget_ranks() -> None:
    """Remove what would make this process one of several ranks: it is alone, whatever shell it was started from."""
    for name in VARIABLES:
        os.environ.pop(name, None)


@contextmanager
def ending_with_others() -> Iterator[None]:
    """End a rank of a replay with `LOST` and one line if it fails: most probably, another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not is_launched():
            raise
        print(one_line(f"A rank failed, or lost another: {error}")[:500], file=sys.stderr)
        raise SystemExit(LOST) from None


def is_first() -> bool:
    """Return True if this process is rank 0, or alone."""
    return not int(os.environ.get("RANK", 0))


def launch(command: Sequence[str], size: int, store: Path) -> int:
    """Run `command` as `size` ranks that meet at `store`; return the exit code of the first that failed, or 0."""
    store.parent.mkdir(parents=True, exist_ok=True)
    store.unlink(missing_ok=True)
    return _run(command, size, store).code


def run_quietly(command: Sequence[str], size: int) -> RanksEnd:
    """Run `command` as `size` ranks, of which only rank 0 prints; return how they ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(KILLED + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="echo-swarm-ranks-", ignore_cleanup_errors=True) as folder:
            return _run(command, size, Path(folder) / "store", output_folder=Path(folder))
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(command: Sequence[str], size: int, store: Path, output_folder: Path | None = None) -> RanksEnd:
    shared = {"WORLD_SIZE": str(size), STORE: str(store)}
    shared |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    ranks: list[Popen[bytes]] = []
    with ExitStack() as pipes:
        try:
            for rank in range(size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                output = pipes.enter_context((output_folder / str(rank)).open("wb")) if output_folder and rank else None
                process = Popen(command, stdin=PIPE, stdout=output, env={**os.environ, **shared, **own})
                assert process.stdin
                pipes.enter_context(process.stdin)
                log.info("rank %d started, pid %d", rank, process.pid)
                ranks.append(process)
            failed = _await_first(ranks, level=logging.INFO if output_folder else logging.ERROR)
        except BaseException as error:
            if output_folder:
                if isinstance(error, KeyboardInterrupt):  # a terminal interrupts all ranks
                    _wait(ranks)
                _interrupt(ranks)
            raise
        if failed is not None:
            (_end_quietly if output_folder else _end)(ranks)
    if failed is not None and ranks[failed].returncode == LOST:
        failed = next((rank for rank, each in enumerate(ranks) if each.returncode not in (0, LOST)), failed)
    lines = tuple(_last_line(output_folder / str(rank)) if output_folder and rank else "" for rank in range(size))
    return RanksEnd(tuple(process.returncode for process in ranks), failed, lines)


def _await_first(ranks: Sequence[Popen[bytes]], *, level: int) -> int | None:
    """Wait until all ranks have ended, or one has failed; return that one."""
    running = {process.pid: rank for rank, process in enumerate(ranks)}
    while running:
        pid, status = os.wait()
        if pid not in running:
            continue
        rank = running.pop(pid)
        ranks[rank].returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            log.log(level, "rank %d ended with code %d; the others end with it", rank, code)
            return rank
    return None


def _end(ranks: Sequence[Popen[bytes]]) -> None:
    """End the ranks that still run: SIGTERM, and SIGKILL after `GRACE_S`."""
    for process in _running(ranks):
        process.send_signal(signal.SIGTERM)
    _wait(ranks)
    _kill(ranks)


def _end_quietly(ranks: Sequence[Popen[bytes]]) -> None:
    """Let the ranks end by themselves, then interrupt those that still run.

    A rank that is about to report a mismatch, or that loses the others in its next exchange, needs the time.
    """
    _wait(ranks)
    _interrupt(ranks)


def _interrupt(ranks: Sequence[Popen[bytes]]) -> None:
    """Interrupt rank 0, which removes its files; then close all pipes; then kill."""
    for process in _running(ranks[:1]):
        process.send_signal(signal.SIGINT)
    _wait(ranks[:1])
    for process in _running(ranks):
        if process.stdin:
            process.stdin.close()
    _wait(ranks)
    _kill(ranks)


def _running(ranks: Sequence[Popen[bytes]]) -> list[Popen[bytes]]:
    return [process for process in ranks if process.poll() is None]


def _wait(ranks: Sequence[Popen[bytes]]) -> None:
    until = time.monotonic() + GRACE_S
    for process in _running(ranks):
        with suppress(TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def _kill(ranks: Sequence[Popen[bytes]]) -> None:
    for process in _running(ranks):
        process.kill()
        process.wait()


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    return lines[-1] if lines else ""
