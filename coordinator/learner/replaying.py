"""The replay of committed updates: the learner's own code, from a checkpoint, compared with the roots in the log.

    folder      updates.json · settings.json · start/ · checkpoint/ · batches/<n>

1. The settings have the digest of every update, and the starting policy the digests of the settings.
2. The checkpoint has the root from which the first update began.
3. Each batch has the root of the groups that its update names.
4. Each update, made again, ends with the root that the log has.

- Any machine comes to the same verdict: the folder holds everything, and the log's entries name all of it.
- Another processor, card or library may round otherwise. If (4) fails where these differ, there is no verdict.
- Updates of several ranks are made again by as many (`launch`), each with this code: they add in the same order. All
  compare the same root. A rank that ends before the others gives no verdict.
- The files are those of a stranger. No code of theirs is run: checkpoints are read as tensors, configurations may name
  no code, and the folder may have no other files than those of a policy.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from coordinator.base.files import read_at_most
from coordinator.learner.algorithm import Algorithm, Correction
from coordinator.learner.commitments import folder_digests
from coordinator.learner.memory_plan import CARDS_MAX
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks, joined, machine, software
from coordinator.learner.settings import TrainSettings
from coordinator.model.forward import sums_in_order
from coordinator.model.watchdog import Watchdog
from ledger.entry import UpdateEntry
from ledger.training import groups_root
from protocol import limits
from protocol.errors import ConfigInvalid, ProofInvalid, SwarmError
from protocol.policy import adapter, chunks, model_config
from protocol.policy.folder import kind_of
from protocol.text.plain import one_line
from protocol.work.learning import KeptBatch
from swarm_exact import cards

Say = Callable[[str], None]

THREADS_PER_CORE = 16
"""The most threads of all ranks for each core: more would take the memory of a volunteer's machine, and not end."""

HUNG_S = 3600.0
"""Time without progress after which a rank ends: another one may hang, and ranks wait for each other for days."""

CONNECTED_MAX = 2
"""The most cards whose sums are the same however they are connected: of two numbers, either order gives one sum."""

_IMPOSSIBLE = (OSError, LookupError, TypeError, ValueError, AttributeError, SwarmError)
"""Errors that files cause with which no learner can have computed."""


class NoVerdict(ConfigInvalid):
    """The replay says nothing about the learner: this machine or its software computes otherwise."""


@dataclass(frozen=True)
class Replayed:
    """An update that was made again."""

    entry: UpdateEntry
    root: str

    @property
    def matches(self) -> bool:
        return self.root == self.entry.after


def read_updates(folder: Path) -> list[UpdateEntry]:
    """Return the log's entries of the updates to replay, in order."""
    return [UpdateEntry.from_value(value) for value in json.loads((folder / "updates.json").read_bytes())["updates"]]


def replay(folder: Path, say: Say) -> Iterator[Replayed]:
    """Make the updates of a folder again, one after the other; raise `ProofInvalid` if its files are not the log's."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates only a part of its functions
    updates = read_updates(folder)
    described = _settings(folder, updates)
    _require_plain(folder / "start")
    torch.set_num_threads(described["threads"])
    ranks = Ranks(described["settings"]["device"], Watchdog(HUNG_S if described["processes"] > 1 else 0.0))
    if ranks.size != described["processes"]:
        raise NoVerdict(f"{described['processes']} processes trained together, and {ranks.size} replay.")
    with ranks.watchdog.watching():
        yield from _replay(folder, updates, described, ranks, say)
    ranks.leave()


def _replay(
    folder: Path, updates: list[UpdateEntry], described: dict[str, Any], ranks: Ranks, say: Say
) -> Iterator[Replayed]:
    with _possible(described, f"The state before update {updates[0].update} as served"):
        policy = TrainedPolicy(folder / "start", train_settings(described["settings"]), ranks)
        policy.restore(folder / "checkpoint")
    if (root := ranks.broadcast(policy.rooting()())) != updates[0].before:
        if updates[0].replaced_by:
            raise _replaced(updates[0])
        raise ProofInvalid(
            f"The checkpoint that is served has the root {root[:16]}…, but update {updates[0].update} began with "
            f"{updates[0].before[:16]}… by the log."
        )
    say(f"the checkpoint is the state {root[:16]}… before update {updates[0].update}")
    for entry in updates:
        with _possible(described, f"Batch {entry.update} as served"):
            batch = KeptBatch.read(read_at_most(folder / "batches" / str(entry.update), limits.KEPT_BATCH_MAX_BYTES))
        if (groups := groups_root(group.to_bytes() for group in batch.groups)) != entry.groups_root:
            raise ProofInvalid(f"Batch {entry.update} as served has the root {groups[:16]}…, not the log's.")
        with _possible(described, f"Batch {entry.update} as served"):
            policy.train_step(batch.groups)
        yield Replayed(entry, ranks.broadcast(policy.rooting()()))


def processes_of(folder: Path) -> int:
    """Return the number of ranks that made the updates, once the settings have their digest (1)."""
    return int(_settings(folder, read_updates(folder))["processes"])


@contextmanager
def _possible(described: dict[str, Any], what: str) -> Iterator[None]:
    """Raise `ProofInvalid` for files that cannot be used, or no verdict if that may be due to another library."""
    try:
        yield
    except _IMPOSSIBLE as error:
        reason = one_line(error.message if isinstance(error, SwarmError) else f"{type(error).__name__}: {error}")[:500]
        if software() == described["software"]:
            raise ProofInvalid(f"{what} cannot be used: {reason}") from error
        raise NoVerdict(f"{what} cannot be used here: {reason} This machine has other libraries.") from error
    except (MemoryError, RuntimeError) as error:
        if described["processes"] > 1:  # another rank ended, or will end with this one
            raise
        raise NoVerdict(one_line(f"{what} cannot be used here: {type(error).__name__}: {error}")[:500]) from error


def _require_plain(start: Path) -> None:
    """Refuse a starting policy that names code or has files beside a policy's: a learner's own copy has none."""
    try:
        for path in start.iterdir():
            kind = kind_of(path.name)
            if kind is None or path.name == adapter.CONFIG or path.is_symlink():
                raise NoVerdict(f"The starting policy has a file {one_line(path.name)}, which is not read.")
            if kind.max_bytes is not None and path.stat().st_size > kind.max_bytes:
                raise NoVerdict(f"The file {path.name} of the starting policy is too large.")
        text = read_at_most(start / "config.json", limits.POLICY_CONFIG_MAX_BYTES)
        config = json.loads(text, object_hook=_without_auto_map)
        if not isinstance(config, dict):
            raise ValueError("config.json is not an object")
        model_config.require_plain(config)
        if reason := model_config.reason_to_refuse(config):
            raise ValueError(reason)
    except (OSError, ValueError, RecursionError) as error:
        raise NoVerdict(f"The starting policy cannot be used: {one_line(str(error))[:500]}.") from error


def _without_auto_map(members: dict[str, Any]) -> dict[str, Any]:
    """Return an object without the code that it names for other programs: `load_model` never runs it."""
    return {name: value for name, value in members.items() if name != "auto_map"}


def _replaced(entry: UpdateEntry) -> NoVerdict:
    return NoVerdict(
        f"The operator put version {entry.replaced_by} in the place of the state before update {entry.update}."
    )


def differences(folder: Path) -> list[str]:
    """Return how this machine differs from the learner's, as far as results may depend on it."""
    described = json.loads((folder / "settings.json").read_bytes())
    device, processes = described["settings"]["device"], described["processes"]
    several_cards = device != "cpu" and processes > 1
    devices = [f"cuda:{card}" for card in range(processes)] if several_cards else [device]
    here = {**software(), "machine": joined(map(machine, devices))}
    there = {**described["software"], "machine": described["machine"]}
    several = [f"the order in which {processes} cards add may depend on how they are connected"] * (
        several_cards and processes > CONNECTED_MAX
    )
    if device != "cpu" and not (_sums_in_order(folder / "start") and cards.has_order()):
        several.append("this card adds some numbers of this model in no fixed order")
    return several + [
        one_line(f"{name} is {here.get(name)} here and {there[name]} there")[:300]
        for name in there
        if here.get(name) != there[name]
    ]


def _sums_in_order(start: Path) -> bool:
    return sums_in_order(AutoConfig.from_pretrained(start, local_files_only=True, trust_remote_code=False))


def train_settings(values: dict[str, Any]) -> TrainSettings:
    """Return the settings of an update from their JSON."""
    algorithm = dict(values["algorithm"])
    algorithm["correction"] = Correction(**algorithm["correction"])
    whole: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    return TrainSettings(**whole | {"algorithm": Algorithm(**algorithm)})


def _settings(folder: Path, updates: list[UpdateEntry]) -> dict[str, Any]:
    """Return the settings of all updates, once their digests are checked (1)."""
    data = (folder / "settings.json").read_bytes()
    if {entry.settings_digest for entry in updates} != {chunks.digest(data)}:
        raise ProofInvalid("The settings are not those of the log, or changed between these updates.")
    try:
        described: dict[str, Any] = json.loads(data)
        train_settings(described["settings"])
        threads, processes = int(described["threads"]), int(described["processes"])
        start, device = dict(described["start"]), torch.device(described["settings"]["device"])
        there = one_line(f"{described['machine']}, {dict(described['software'])}")[:300]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise ProofInvalid("The settings in the log are not those of a learner.") from error
    if folder_digests(folder / "start") != start:
        raise ProofInvalid("The starting policy as served has other digests than the settings in the log.")
    if not 0 < processes <= CARDS_MAX:
        raise NoVerdict(f"{processes} processes trained together; at most {CARDS_MAX} replay.")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise NoVerdict(f"The learner computed on {there}, and this machine has no such card.")
    if device.type == "cuda" and processes > max(1, torch.cuda.device_count()):
        raise NoVerdict(f"The learner computed on {processes} cards, and this machine has fewer.")
    cores = os.cpu_count() or 1
    if device.type == "cpu" and processes > cores:
        raise NoVerdict(f"The learner computed by {processes} processes, and this machine has {cores} cores.")
    if threads < 1 or processes * threads > THREADS_PER_CORE * cores:
        raise NoVerdict(
            f"The learner computed with {processes * threads} threads; on {cores} cores, at most "
            f"{THREADS_PER_CORE * cores} replay."
        )
    if changed := [entry for entry in updates[1:] if entry.replaced_by]:
        raise _replaced(changed[0])
    return described
