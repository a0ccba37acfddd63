"""The files with which one update of the learner is replayed: fetched, compared with the log, and put in a folder.

1. The update was drawn from the log, so that the operator promised to keep what a replay needs (`ledger.training`).
2. The settings have the digest that the log has for every update from the checkpoint on.
3. Each batch has the root that the log has. Each of its groups has the id of a claim that was credited before the
   update, and, where one node made all of it, the tokens and log-probabilities that this node signed.
4. The rest is for the replay (`swarm-coordinator audit update`), which computes the roots of the states.

Nobody can see here whether a reward was right when the batch was formed, or whose nodes worked: the operator may pay
nodes of its own.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from ledger.entry import UpdateEntry
from ledger.training import LATER, TrainingChain, groups_root, is_drawn
from protocol import limits
from protocol.errors import ConfigInvalid, MalformedMessage, NotFound, ProofInvalid
from protocol.policy import chunks
from protocol.text.plain import size_text
from protocol.wire.signing import open_envelope
from protocol.work.learning import KeptBatch, TrainingGroup
from protocol.work.rollout import RolloutClaim
from swarm_node.ledger.log_reader import PublicFiles
from swarm_node.ledger.log_verify import ReadLog

LIST_MAX_BYTES = 4 * limits.MIB

FILE_MAX_BYTES = 2**44
"""A file of a checkpoint: of more than a million million parameters nobody replays an update."""

KEPT_FOLDER = "checkpoints/"

_FolderName = Annotated[str, StringConstraints(pattern=r"^(start|checkpoints/[0-9]{9})$")]
_KeptName = Annotated[str, StringConstraints(pattern=r"^(\.metadata|[A-Za-z0-9_][A-Za-z0-9_.-]{0,119})$")]


class _KeptFiles(BaseModel):
    """Folder → file → size in bytes."""

    folders: dict[_FolderName, dict[_KeptName, Annotated[int, Field(ge=0, le=FILE_MAX_BYTES)]]]


@dataclass(frozen=True)
class UpdateFiles:
    """A folder for the replay of an update, and what was compared with the log already."""

    updates: tuple[UpdateEntry, ...]
    groups: int
    unsigned: int
    """Number of groups that several nodes made, whose signatures were not compared."""


async def drawn(files: PublicFiles, log: ReadLog) -> list[int]:
    """Return the updates that the log draws (1), each by the promise in the settings that it had then."""
    chain = log.training
    promises: dict[str, int] = {}
    found = []
    for update, entry in sorted(chain.promised.items()):
        if entry.settings_digest not in promises:
            promises[entry.settings_digest] = one_in(await settings_of(files, entry))
        root = log.root(chain.formed[update + LATER])
        if is_drawn(root, update, promises[entry.settings_digest]):
            found.append(update)
    return found


async def settings_of(files: PublicFiles, entry: UpdateEntry) -> bytes:
    """Return the settings of an update (2)."""
    data = await _need(files, f"training/settings/{entry.settings_digest}", limits.TRAINING_SETTINGS_MAX_BYTES)
    if chunks.digest(data) != entry.settings_digest:
        raise ProofInvalid(f"The settings that are served for update {entry.update} are not those in the log.")
    return data


def one_in(settings: bytes) -> int:
    """Return the promise in the settings: one of so many updates is kept; 0: none."""
    try:
        return int(json.loads(settings)["kept_one_in"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise MalformedMessage("The settings of the learner have no kept_one_in.") from None


async def fetch(
    files: PublicFiles,
    log: ReadLog,
    update: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    batch_max_bytes: int = limits.KEPT_BATCH_MAX_BYTES,
) -> UpdateFiles:
    """Fetch everything for the replay of an update into a folder, which must not exist."""
    kept = await _kept(files)
    numbers = [int(name.removeprefix(KEPT_FOLDER)) for name in kept.folders if name.startswith(KEPT_FOLDER)]
    start = max((number for number in numbers if number < update), default=None)
    if start is None:
        raise _not_served(update, "no checkpoint before it is served")
    span = _span(log.training, start, update)
    (folder / "batches").mkdir(parents=True)
    (folder / "settings.json").write_bytes(await settings_of(files, span[0]))
    groups = unsigned = 0
    for entry in span:
        data = await files.file(f"training/batches/{entry.update}", batch_max_bytes)
        if data is None:
            raise _not_served(update, f"batch {entry.update} is not served")
        batch = KeptBatch.read(data)
        unsigned += check_batch(batch, entry, log)
        groups += len(batch.groups)
        (folder / "batches" / str(entry.update)).write_bytes(data)
    first = span[0].update
    said = f"batch {update} are" if first == update else f"batches {first} to {update} are"
    say(f"the groups of {said} those in the log; their claims were credited before")
    names = {"start": "start", f"{KEPT_FOLDER}{start:09d}": "checkpoint"}
    for name, target in names.items():
        (folder / target).mkdir()
        for file, size_bytes in kept.folders.get(name, {}).items():
            say(f"fetching {name}/{file}, {size_text(size_bytes)}")
            await _fetch_file(files, f"training/{name}/{file}", size_bytes, folder / target / file)
    described = {
        "updates": [entry.model_dump() for entry in span],
        "indexes": [log.training.places[e.update] for e in span],
    }
    (folder / "updates.json").write_text(json.dumps(described))
    return UpdateFiles(span, groups, unsigned)


def check_batch(batch: KeptBatch, entry: UpdateEntry, log: ReadLog) -> int:
    """Compare a batch with the log (3); return the number of groups whose signatures could not be compared."""
    if batch.number != entry.update or groups_root(group.to_bytes() for group in batch.groups) != entry.groups_root:
        raise ProofInvalid(f"The batch that is served for update {entry.update} does not have the root in the log.")
    if len(batch.rollouts) != len(batch.groups):
        raise ProofInvalid(f"Batch {entry.update} does not have the signed rollout of each group.")
    ids = [claim for group in batch.groups for claim in (group.claim_id, *(each.claim_id for each in group.earlier))]
    index = log.training.places[entry.update]
    for claim in ids:
        if log.audits.credited.get(claim, index) >= index:
            raise ProofInvalid(
                f"Batch {entry.update} has a group of claim {claim[:16]}…, which no node was credited for."
            )
    if len(set(ids)) < len(ids):
        raise ProofInvalid(f"Batch {entry.update} has a claim twice.")
    return sum(_is_unsigned(group, rollout) for group, rollout in zip(batch.groups, batch.rollouts, strict=True))


def _is_unsigned(group: TrainingGroup, rollout: bytes) -> bool:
    """Return True if several nodes made a group; else require the tokens and log-probabilities that its node signed."""
    payload = open_envelope("rollout", rollout).payload
    if chunks.digest(payload) != group.claim_id:
        raise ProofInvalid(f"The signed rollout of claim {group.claim_id[:16]}… is another one.")
    if group.earlier:
        return True
    signed = RolloutClaim.from_bytes(payload).samples
    if [(each.tokens, each.logprobs) for each in signed] != [(each.tokens, each.logprobs) for each in group.samples]:
        raise ProofInvalid(f"The group of claim {group.claim_id[:16]}… has other samples than its node signed.")
    return False


def _span(chain: TrainingChain, start: int, update: int) -> tuple[UpdateEntry, ...]:
    """Return the entries of the updates from a checkpoint to `update`."""
    numbers: Sequence[int] = range(start + 1, update + 1)
    missing = [number for number in numbers if number not in chain.updates]
    if missing:
        raise NotFound(f"Update {missing[0]} is not in the log.", hint="`ledger verify` says which updates are.")
    return tuple(chain.updates[number] for number in numbers)


async def _kept(files: PublicFiles) -> _KeptFiles:
    data = await files.file("training/kept", LIST_MAX_BYTES)
    if data is None:
        raise ConfigInvalid(
            "This round keeps nothing for replays of its learner.",
            hint="`ledger verify` still checks the chain of its updates. The operator can set learner.kept_one_in.",
        )
    try:
        return _KeptFiles.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise MalformedMessage(f"{error.error_count()} fields of the list of kept files are wrong.") from None


async def _fetch_file(files: PublicFiles, path: str, size_bytes: int, target: Path) -> None:
    """Write a file of many parts."""
    if size_bytes > shutil.disk_usage(target.parent).free:
        raise ConfigInvalid(f"The disk has no room for {path}, {size_text(size_bytes)}.", hint="Use --save.")
    with target.open("wb") as file:
        for part in range(-(-size_bytes // limits.TRAINING_PART_BYTES)):
            file.write(await _need(files, f"{path}/{part}", limits.TRAINING_PART_BYTES))


async def _need(files: PublicFiles, path: str, max_bytes: int) -> bytes:
    data = await files.file(path, max_bytes)
    if data is None:
        raise NotFound(f"{path} is not served.", hint="It may have been removed just now: try again.")
    return data


def _not_served(update: int, why: str) -> ProofInvalid:
    return ProofInvalid(
        f"Update {update} was drawn, so the operator promised to keep it, but {why}.",
        hint="Try again in some minutes. If it stays so, the operator withholds it: tell other participants.",
    )
