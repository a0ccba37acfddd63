"""The learner's commitments: the root of the state after each update, recorded in the ledger beside the next update.

- The root after an update is the root before the next one: each state is hashed once, on a thread, while the next
  batch is awaited and computed. No weight changes before that (`Outgoing.wait_until_read`).
- A checkpoint holds the commitment to its own update without the root. A learner that resumes computes the root from
  what it restored, and commits again: a kill leaves no hole in the log.
- If the operator puts a version in the place of the learner's state, the next commitment names it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.base.files import file_digest
from coordinator.config import Config
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.crew import Crew
from coordinator.learner.outgoing import Outgoing
from coordinator.learner.ranks import Machine, joined
from coordinator.learner.settings import train_settings
from ledger.training import groups_root
from protocol.errors import ConfigInvalid
from protocol.work.learning import TrainingGroup, UpdateCommitment

UNKNOWN = "0" * 64
"""The root in a stored commitment, which is computed again from the checkpoint."""


class Commitments:
    """The chain of one round's updates, as far as this learner makes it."""

    def __init__(self, config: Config, client: CoordinatorClient, crew: Crew) -> None:
        self._config, self._client, self._crew = config, client, crew
        self._sending = Outgoing()
        self._settings = b""
        self._root = ""
        """The root of the present state, as soon as its thread has read it."""
        resumed = crew.resumed or {}
        self._last = bytes(resumed.get("commitment", b""))
        """The commitment to the last update, without the root after it."""
        self._replaced_by = int(resumed.get("replaced_by", 0))

    def begin(self) -> None:
        """Compute the root of the state before the first update, and commit again to the update that led to it."""
        start = self._config.round.directory / "learner" / "start"
        self._settings = settings_document(self._config, start, self._crew.machines())
        self._root = self._crew.rooting()()
        if self._last and not self._replaced_by:
            self._client.commit(UpdateCommitment.from_bytes(self._last).model_copy(update={"after": self._root}))

    def add(self, groups: Sequence[TrainingGroup]) -> None:
        """Commit to the update that was just made, in parallel with the next one."""
        self._sending.finish()
        policy = self._crew.policy
        commitment = UpdateCommitment(
            update=policy.update,
            before=self._root,
            after=UNKNOWN,
            groups_root=groups_root(group.to_bytes() for group in groups),
            settings=self._settings,
            seed=self._config.round.seed,
            steps=policy.steps,
            replaced_by=self._replaced_by,
        )
        self._last, self._replaced_by = commitment.to_bytes(), 0
        compute = self._crew.rooting()

        def read() -> None:
            self._root = compute()

        def send() -> None:
            with closing(self._client.another()) as client:
                client.commit(commitment.model_copy(update={"after": self._root}))

        self._sending.start(read, send)

    def replaced(self, by: int, root: str = "") -> None:
        """Begin anew from a version that was loaded in place of the state; call `finish` before it is loaded.

        `root` is that of the state in the log, if the version is the result of a retraction.
        """
        self._root, self._replaced_by = self._crew.rooting()(), by
        if root and self._root != root:
            raise ConfigInvalid(
                f"The state of the retraction has the root {self._root[:16]}…, but the log has {root[:16]}….",
                hint="Restore the folder learner/retracted of the round from a backup.",
            )

    def beside(self) -> dict[str, Any]:
        """Return the plain values for a checkpoint of the present state."""
        return {"commitment": self._last, "replaced_by": self._replaced_by}

    def wait_until_read(self) -> None:
        """Wait until the state's root is known, so that the state may change."""
        self._sending.wait_until_read()

    def check(self) -> None:
        """Raise the error of the thread, if there is one."""
        self._sending.check()

    def finish(self) -> None:
        """Wait until the last update is recorded."""
        self._sending.finish()

    def abandon(self) -> None:
        """Wait for the thread for some seconds only."""
        self._sending.abandon()


def settings_document(config: Config, start: Path, machines: Sequence[Machine]) -> bytes:
    """Return everything that determines an update beside its state and its groups, as JSON.

    `machine` and `software` are those that the same bits depend on; `start` has the digests of the starting policy.
    `machines` are those of all ranks that train, which torchrun may have started, whatever the settings say.
    """
    learner = config.learner
    return document(
        {
            "settings": asdict(train_settings(config)),
            "threads": learner.threads,
            "processes": len(machines),
            "kept_one_in": learner.kept_one_in,
            "software": {name: joined(each.software[name] for each in machines) for name in machines[0].software},
            "machine": joined(each.name for each in machines),
            "start": folder_digests(start),
        }
    )


def document(values: Mapping[str, Any]) -> bytes:
    """Return values as JSON in one form."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def folder_digests(folder: Path) -> dict[str, str]:
    """Return the BLAKE3 of each file of a folder by its name."""
    return {path.name: file_digest(path) for path in sorted(folder.iterdir())}
