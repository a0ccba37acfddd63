"""Updates of a learner of several ranks, in a folder as an auditor has it, and their replays by as many."""

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from coordinator.learner import replaying
from coordinator.learner.commitments import document, folder_digests
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks, joined, machine_here, software
from ledger.entry import UpdateEntry
from ledger.training import groups_root
from protocol.policy import chunks
from protocol.work.learning import KeptBatch, TrainingGroup
from tests.coordinator.learner.forked_ranks import forked
from tests.coordinator.learner.two_ranks import BATCHES, PLAIN

UPDATES = 2


def learn(start: Path, folder: Path) -> None:
    """Make some updates as one of several ranks, and leave what an auditor fetches."""
    ranks = Ranks()
    torch.manual_seed(ranks.rank)  # as if each rank had drawn other numbers
    policy = TrainedPolicy(start, PLAIN, ranks)
    policy.save(folder / "checkpoints")
    described = {
        "settings": asdict(PLAIN), "threads": 1, "processes": ranks.size, "kept_one_in": 1,
        "software": software(), "machine": joined(each.name for each in ranks.gather_values(machine_here("cpu"))),
        "start": folder_digests(start),
    }  # fmt: skip
    settings, root, entries = document(described), policy.rooting()(), []
    batches = BATCHES[:UPDATES]
    for number, groups in enumerate(batches, 1):
        policy.train_step(groups)
        before, root = root, policy.rooting()()
        fields: dict[str, Any] = {
            "update": number, "attempt": 1, "before": before, "after": root,
            "groups_root": groups_root(group.to_bytes() for group in groups), "seed": 0, "replaced_by": 0,
            "settings_digest": chunks.digest(settings), "steps": policy.steps,
        }  # fmt: skip
        if ranks.first:
            entries.append(UpdateEntry.model_validate(fields).model_dump())
    if ranks.first:
        shutil.copytree(start, folder / "start")
        (folder / "checkpoints" / f"{0:09d}").rename(folder / "checkpoint")
        (folder / "settings.json").write_bytes(settings)
        (folder / "updates.json").write_text(json.dumps({"updates": entries}))
        (folder / "batches").mkdir()
        for number, groups in enumerate(batches, 1):
            replace_batch(folder, number, tuple(groups))
    ranks.leave()


def commit(folder: Path, **change: Any) -> None:
    """Have the log say that an update was made with other settings than it was."""
    described = json.loads((folder / "settings.json").read_bytes())
    described["settings"] |= change
    (folder / "settings.json").write_bytes(document(described))
    file = folder / "updates.json"
    updates = json.loads(file.read_bytes())["updates"]
    for each in updates:
        each["settings_digest"] = chunks.digest(document(described))
    file.write_text(json.dumps({"updates": updates}))


def replace_batch(folder: Path, number: int, groups: tuple[TrainingGroup, ...]) -> None:
    """Have the log and the files say that a batch had these groups."""
    kept = KeptBatch(number=number, groups=groups, rollouts=(b"",) * len(groups))
    (folder / "batches" / str(number)).write_bytes(kept.to_bytes())
    file = folder / "updates.json"
    updates = json.loads(file.read_bytes())["updates"]
    updates[number - 1]["groups_root"] = groups_root(group.to_bytes() for group in groups)
    file.write_text(json.dumps({"updates": updates}))


def replay(folder: Path) -> None:
    """Make the updates again as one of several ranks; rank 0 prints which of them match."""
    found = [each.matches for each in replaying.replay(folder, lambda _: None)]
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found), flush=True)


def main(start: Path, folder: Path) -> None:
    """Learn by two ranks, and replay three times: twice what they did, then as if the rate had been another."""
    torch.set_num_threads(1)
    assert forked(2, learn, start, folder) == [0, 0]
    for change in ({}, {}, {"learning_rate": 2e-3}):
        commit(folder, **change)
        assert forked(2, replay, folder) == [0, 0]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
