"""Check that learner and auditor fit into this machine, which `launch` makes before it creates or downloads anything.

- The cards of learner and auditor are checked at every launch: a card may be gone since the last one.
- A separate process makes the check: the coordinator runs without torch, and a process that queries a card takes some
  of its memory. If that process fails, the round is launched: a round is never refused by a guess.
- A refusal names the phase, the memory that it needs, the free memory, and settings under which the learner fits.
- An auditor on a card of the learner counts there; on another card, it must fit on that one.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.base.files import nearest_folder
from coordinator.config import Config
from coordinator.learner import start
from coordinator.learner.memory_plan import GIB, RESERVED_BYTES, Cards, auditors_card
from protocol.errors import ConfigInvalid
from protocol.start import quick_imports

if TYPE_CHECKING:
    from coordinator.learner.memory import AuditorNeed, Footprint

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


class Lack(NamedTuple):
    """A part of a round that does not fit."""

    who: str
    """The learner, or the auditor if it alone does not fit."""
    what: str
    needed: int
    free: int


@dataclass(frozen=True)
class FreeBytes:
    """The free bytes of a machine."""

    memory: int
    disk: int
    card: int | None = None
    """Bytes on each card; None if the learner computes on the CPU."""
    auditor: bool = True
    """True if an auditor is started on this machine, too."""
    auditor_card: int | None = None
    """Bytes on the auditor's card, if the learner uses another one."""

    def holds(self, size: int, ranks: int) -> bool:
        """Return True if each of `ranks` ranks has room for `size` bytes."""
        return size <= self.card if self.card is not None else ranks * size <= self.memory

    def lack(self, needed: "Footprint", auditor: "AuditorNeed | None" = None) -> Lack | None:
        """Return the first part that does not fit, with the `auditor` if one is started."""
        phase, on_card = needed.worst, auditor is not None and auditor.on_card
        shares = on_card and self.auditor_card is None and self.card is not None
        beside = auditor.peak_bytes + RESERVED_BYTES if auditor and shares else 0
        named = f", with the auditor beside it on {auditor.device}," if auditor and shares else ""
        learner, own = "learner", needed.peak_bytes + beside
        memory = needed.host_bytes + (auditor.host_bytes if auditor else 0)
        wanted = [
            Lack(learner, f"{phase} on each card{named}", own, own if self.card is None else self.card),
            Lack(
                learner, f"{phase if self.card is None else 'load'} in the memory of this machine", memory, self.memory
            ),
            Lack(learner, "the round's data on the disk", needed.disk_bytes, self.disk),
        ]
        if auditor and on_card and self.auditor_card is not None:
            wanted.append(Lack("auditor", f"{auditor.worst} in {auditor.place}", auditor.peak_bytes, self.auditor_card))
        return next((want for want in wanted if want.needed > want.free), None)


def refusal(config: Config, room: FreeBytes, *, replay: bool = False) -> ConfigInvalid | None:
    """Return the error of a learner, or of the auditor beside it, that does not fit; None if both fit."""
    with quick_imports():
        from coordinator.learner import memory

    simulations = memory.Simulations(memory.described(config))
    versions = 0 if replay else memory.kept_versions(config)
    checkpoints = 0 if replay else memory.kept_checkpoints(config)
    device, ranks = config.learner.device, config.learner.processes

    estimates: dict[str, memory.Estimate] = {}

    auditor = simulations.auditor(config) if room.auditor else None

    def lack(ranks: int, *, beside: "AuditorNeed | None" = auditor, **changes: Any) -> Lack | None:
        needed = estimated(**changes).footprint(ranks, device=device, versions=versions, checkpoints=checkpoints)
        return room.lack(needed, beside)

    def estimated(**changes: Any) -> memory.Estimate:
        key = json.dumps(changes)
        estimates[key] = estimates.get(key) or memory.estimate(config, simulations, **changes)
        return estimates[key]

    def fits(processes: int = ranks, **changes: Any) -> bool:
        """Return True if the learner fits; nothing is simulated if the weights alone are too large."""
        return room.holds(estimated(**changes).least_bytes(processes), processes) and not lack(processes, **changes)

    if not (missing := lack(ranks)):
        return None
    helpful = [
        ", ".join(f"learner.{name}={json.dumps(value)}" for name, value in change.items())
        for change in (_changes(config) if missing.who == "learner" else ())
        if fits(**change)
    ]
    if auditor and auditor.on_card and not lack(ranks, beside=simulations.auditor(config, device="cpu")):
        helpful = ['audit.device="cpu"', *helpful]
    return ConfigInvalid(
        f"The {missing.who} does not fit: {missing.what} needs {missing.needed / GIB:.1f} GiB, and "
        f"{missing.free / GIB:.1f} GiB are free.",
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
    device, ranks = config.learner.device, config.learner.processes
    own = auditors_card(config, ranks) if auditor else ""
    return FreeBytes(
        _free_memory(),
        disk,
        _free_on_cards("learner", device, ranks),
        auditor,
        _free_on_cards("audit", own) if own else None,
    )


def _free_memory() -> int:
    """Return the free bytes of this machine, or of the container around this process."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(available[1]) * 1024 if available else sys.maxsize
    bound, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if bound.is_file() and (written := bound.read_text().strip()).isdigit():
        free = min(free, int(written) - int(used.read_text()))
    return free


def _free_on_cards(section: str, device: str, ranks: int = 1) -> int | None:
    """Return the bytes for tensors on the fullest card of a section's ranks; None on the CPU."""
    if device == "cpu":
        return None
    import torch

    chosen = _usable_cards(section, device, ranks)
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


def _checked_here(config: Config, asked: Sequence[str]) -> ConfigInvalid | None:
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
        refused = _checked_here(config, sys.argv[1:])
    except ConfigInvalid as error:
        refused = error
    if refused:
        print(json.dumps({"message": refused.message, "hint": refused.hint}))
    return REFUSED if refused else 0


if __name__ == "__main__":
    sys.exit(main())
