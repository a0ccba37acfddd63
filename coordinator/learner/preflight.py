"""Check that the learner fits into this machine, which `launch` makes before it creates a key or downloads anything.

- The cards of learner and auditor are checked at every launch: a card may be gone since the last one.
- A separate process makes the check: the coordinator runs without torch, and a process that queries a card takes some
  of its memory. If that process fails, the round is launched: a round is never refused by a guess.
- A refusal names the phase, the memory that it needs, the free memory, and settings under which the learner fits.
- Free memory counts, not installed memory: other programs keep theirs.
"""

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.base.files import nearest_folder
from coordinator.config import Config
from coordinator.learner import start
from coordinator.learner.memory_plan import GIB, Cards
from protocol.errors import ConfigInvalid
from protocol.start import quick_imports

if TYPE_CHECKING:
    from coordinator.learner.memory import Footprint

log = logging.getLogger(__name__)

TIMEOUT_S = 900.0
"""The time limit of the check: a model of 64 layers takes 30 s on a slow machine, and a refusal tries several ways."""

REFUSED = 2
"""The exit code of the process if the learner does not fit."""

CARDS = "cards"
"""The argument of the process that checks the cards alone."""

LORA_RANK = 32
"""The rank of the adapters that are tried if all weights do not fit."""

CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux gives the memory limit of a container."""


def require_fits(config: Config, *, auditor: bool = False, replay: bool = False) -> None:
    """Refuse a learner, and with `auditor` an auditor, that would run out of memory or disk on this machine.

    A `replay` runs in a round that is stored already: it writes only a state and a version of its own.
    """
    if config.model.path == start.EMBEDDED:
        return
    log.info("Checking that the learner fits on this machine; this may take a minute …")
    given = {"auditor": auditor, "replay": replay}
    if failure := _check(config, *(name for name, on in given.items() if on)):
        log.warning("The memory that the learner needs could not be computed: %s", failure)


def require_cards(config: Config, *, learner: bool, auditor: bool) -> None:
    """Refuse a learner and an auditor that are to compute on a card that torch cannot use on this machine."""
    started = {"learner": learner and config.learner.device, "auditor": auditor and config.audit.device}
    names = [name for name, device in started.items() if device and device != "cpu"]
    if not names:
        return
    log.info("Checking that torch can use the GPU of the %s …", " and of the ".join(names))
    if failure := _check(config, CARDS, *names):
        log.warning("The GPU could not be checked: %s", failure)


def _check(config: Config, *names: str) -> str:
    """Run this module as a process, and raise the error that it found; return why it failed, "" if it did not."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "coordinator.learner.preflight", *names],
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == REFUSED:
        refused = json.loads(done.stdout.strip().rpartition("\n")[2])
        raise ConfigInvalid(refused["message"], hint=refused["hint"])
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


@dataclass(frozen=True)
class FreeBytes:
    """The free bytes of a machine."""

    memory: int
    disk: int
    card: int | None = None
    """Bytes on each card; None if the learner computes on the CPU."""
    auditor: bool = True
    """True if an auditor is started on this machine, too."""

    def holds(self, size: int, ranks: int) -> bool:
        """Return True if each of `ranks` ranks has room for `size` bytes."""
        return size <= self.card if self.card is not None else ranks * size <= self.memory

    def lack(self, needed: "Footprint") -> tuple[str, int, int] | None:
        """Return the first part that does not fit, the bytes that it needs and those that are free."""
        phase = needed.worst
        memory = needed.host_bytes + (needed.auditor_bytes if self.auditor else 0)
        wanted = [
            (f"{phase} on each card", needed.peak_bytes, needed.peak_bytes if self.card is None else self.card),
            (f"{phase if self.card is None else 'load'} in the memory of this machine", memory, self.memory),
            ("the round's data on the disk", needed.disk_bytes, self.disk),
        ]
        return next((want for want in wanted if want[1] > want[2]), None)


def refusal(config: Config, room: FreeBytes, *, replay: bool = False) -> ConfigInvalid | None:
    """Return the error of a learner that does not fit; None if it fits."""
    with quick_imports():
        from coordinator.learner import memory

    simulations = memory.Simulations(memory.described(config))
    versions = 0 if replay else memory.kept_versions(config)
    checkpoints = 0 if replay else memory.kept_checkpoints(config)
    device, ranks = config.learner.device, config.learner.processes

    estimates: dict[str, memory.Estimate] = {}

    def lack(ranks: int, **changes: Any) -> tuple[str, int, int] | None:
        needed = estimated(**changes).footprint(ranks, device=device, versions=versions, checkpoints=checkpoints)
        return room.lack(needed)

    def estimated(**changes: Any) -> memory.Estimate:
        key = json.dumps(changes)
        estimates[key] = estimates.get(key) or memory.estimate(config, simulations, **changes)
        return estimates[key]

    def fits(processes: int = ranks, **changes: Any) -> bool:
        """Return True if the learner fits; nothing is simulated if the weights alone are too large."""
        return room.holds(estimated(**changes).least_bytes(processes), processes) and not lack(processes, **changes)

    if not (missing := lack(ranks)):
        return None
    what, needed, there = missing
    helpful = [
        ", ".join(f"learner.{name}={json.dumps(value)}" for name, value in change.items())
        for change in _changes(config)
        if fits(**change)
    ]
    return ConfigInvalid(
        f"The learner does not fit: {what} needs {needed / GIB:.1f} GiB, and {there / GIB:.1f} GiB are free.",
        hint=f"Each of these alone fits: {'; '.join(helpful)}."
        if helpful
        else "None of the settings tried fits. `swarm-coordinator plan --gpu NAME:COUNT` shows if other cards fit.",
    )


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Yield settings that need less memory, the smallest change first."""
    from coordinator.learner.memory import PROMPT_TOKENS

    now, least = config.learner, PROMPT_TOKENS + config.sampling.max_new_tokens
    less = {"micro_batch_tokens": least} if not now.micro_batch_tokens or now.micro_batch_tokens > least else {}
    twice: dict[str, Any] = {} if now.gradient_checkpointing else {"gradient_checkpointing": True}
    light: dict[str, Any] = (
        {} if now.lora_rank or now.processes > 1 else {"optimizer_dtype": "bfloat16", "optimizer_offload": True}
    )
    adapters: dict[str, Any] = {} if now.lora_rank else {"lora_rank": LORA_RANK}
    ranks = ({"processes": count} for count in (2, 4, 8) if count > now.processes and now.device != "cpu")
    for change in (twice, less, twice | less, twice | less | light, *ranks, adapters, adapters | twice | less):
        if change:
            yield change


def this_machine(config: Config, *, auditor: bool) -> FreeBytes:
    """Return the free bytes of this machine."""
    disk = shutil.disk_usage(nearest_folder(config.round.directory)).free
    return FreeBytes(_free_memory(), disk, _free_on_cards(config.learner.device, config.learner.processes), auditor)


def _free_memory() -> int:
    """Return the free bytes of this machine, or of the container around this process."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(available[1]) * 1024 if available else sys.maxsize
    bound, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if bound.is_file() and (written := bound.read_text().strip()).isdigit():
        free = min(free, int(written) - int(used.read_text()))
    return free


def _free_on_cards(device: str, ranks: int) -> int | None:
    """Return the bytes for tensors on the fullest card of the ranks; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    chosen = _usable_cards("learner", device, ranks)
    free = min(torch.cuda.mem_get_info(number)[0] for number in chosen)
    return Cards(device, free, ranks).usable_bytes


def _usable_cards(section: str, device: str, ranks: int = 1) -> Sequence[int]:
    """Return the numbers of the cards that a setting names; raise an error if torch cannot compute on one of them."""
    import torch

    from swarm_exact import cards

    chosen = range(ranks) if ranks > 1 else [torch.device(device).index or 0]
    several = f", {section}.processes {ranks}" if ranks > 1 else ""
    for number in chosen:
        if reason := cards.reason_to_refuse(torch.device("cuda", number)):
            raise ConfigInvalid(
                f"{section}.device is {device}{several}: {reason.rstrip('.')}.",
                hint="`nvidia-smi` shows the cards. Install the driver and the build of torch for them, or set "
                f'{section}.device = "cpu".',
            )
    return chosen


def _found(config: Config, asked: Sequence[str]) -> ConfigInvalid | None:
    """Make the check with these arguments of the process; return or raise the error, if there is one."""
    if CARDS not in asked:
        return refusal(config, this_machine(config, auditor="auditor" in asked), replay="replay" in asked)
    if "learner" in asked:
        _usable_cards("learner", config.learner.device, config.learner.processes)
    if "auditor" in asked:
        _usable_cards("audit", config.audit.device)
    return None


def main() -> int:
    config = Config.model_validate_json(sys.stdin.read())
    try:
        refused = _found(config, sys.argv[1:])
    except ConfigInvalid as error:
        refused = error
    if refused:
        print(json.dumps({"message": refused.message, "hint": refused.hint}))
    return REFUSED if refused else 0


if __name__ == "__main__":
    sys.exit(main())
