"""The learner's process in a round whose versions come from trainers: it publishes their weights, and trains nothing.

    the starting policy → version 1, then for each offer: checked, completed → the next version, or refused

- An offer is what the trainer changed: files of weights, or an adapter. Configuration and tokenizer are the round's,
  and may be left out. `coordinator.learner.offering` checks the weights and writes the policy folder.
- A killed process loses nothing: the coordinator repeats the offer, and weights that are those of the newest version
  are not published again.
"""

import filecmp
import logging
import shutil
from pathlib import Path

from coordinator.config import Config
from coordinator.learner import offering
from coordinator.learner.client import CoordinatorClient
from coordinator.learner.crew import Crew
from coordinator.learner.loop import Learner
from coordinator.learner.ranks import Ranks
from coordinator.model.watchdog import Watchdog
from coordinator.publishing.publish import OFFERED
from protocol.errors import ConfigInvalid, SwarmError
from protocol.policy import adapter
from protocol.work.learning import LearnerProgress, OfferedVersion, OfferOutcome

log = logging.getLogger(__name__)

START_FOLDERS = ("start", "publishing", "checkpoints")
"""Folders that nobody reads any more once version 1 is published; earlier releases wrote a checkpoint, too."""

COMPLETED = ("config.json", "tokenizer.json")
"""The files that an offer of weights may leave out."""


def run(config: Config, url: str, token: Path) -> None:
    """Publish the starting policy, then what trainers offer, until the round is finished."""
    client = CoordinatorClient(url, token.read_text().strip())
    if not client.state().newest_version:
        Learner(config, client, Crew(config, Ranks(config.learner.device, Watchdog(0)))).publish_start()
    for name in START_FOLDERS:  # gigabytes that the disk and every backup would hold for nothing
        shutil.rmtree(config.round.directory / "learner" / name, ignore_errors=True)
    offers = TrainersOffers(config, client)
    while not client.state().finished:
        client.progress(LearnerProgress(phase="waiting for a trainer", fraction=0.0, detail=""))
        if (offer := client.offer()) is not None:
            client.answer(offers.published(offer))


class TrainersOffers:
    """The offers of trainers, and the newest version that they are compared with."""

    def __init__(self, config: Config, client: CoordinatorClient) -> None:
        self._client = client
        self._folder = config.round.directory / "learner"
        self._offered = config.round.directory / "uploads" / OFFERED
        self._version = 0
        """The version whose files are in `current`."""

    @property
    def _current(self) -> Path:
        return self._folder / "current"

    def published(self, offer: OfferedVersion) -> OfferOutcome:
        """Publish an offer, and return the version; or return why it cannot be published."""
        try:
            return OfferOutcome(offer=offer.offer, version=self._publish(offer))
        except SwarmError as error:
            log.warning("refused an offer: %s", error)
            said = error.to_wire()
            return OfferOutcome(offer=offer.offer, code=said["code"], message=said["message"], hint=said["hint"])

    def _publish(self, offer: OfferedVersion) -> int:
        folder, made = self._offered / offer.offer, self._folder / "offered"
        if not folder.is_dir():
            raise ConfigInvalid(
                "The learner's process does not see the weights that were sent.",
                hint="With learner.external, it must run where the round's folder is.",
            )
        self._fetch_current(offer.version - 1)
        shutil.rmtree(made, ignore_errors=True)
        _complete(folder, self._current)
        offering.prepare(folder, self._current, made)
        if _same(made, self._current):
            return self._version
        self._client.progress(LearnerProgress(phase="publishing", fraction=0.0, detail=f"version {offer.version}"))
        self._client.publish(offer.version, offer.update, made)
        shutil.rmtree(self._current)
        made.rename(self._current)
        self._version = offer.version
        log.info("published version=%d update=%d", offer.version, offer.update)
        return offer.version

    def _fetch_current(self, version: int) -> None:
        """Have the files of the newest version in `current`."""
        if self._version == version:
            return
        shutil.rmtree(self._current, ignore_errors=True)
        self._current.mkdir(parents=True)
        self._client.fetch(version, self._current)
        self._version = version


def _complete(folder: Path, current: Path) -> None:
    """Add the round's own files that an offer leaves out."""
    is_adapter = (current / adapter.CONFIG).exists()
    for name in (adapter.CONFIG,) if is_adapter else COMPLETED:
        if not (folder / name).exists():
            shutil.copyfile(current / name, folder / name)


def _same(made: Path, current: Path) -> bool:
    names = {path.name for path in made.iterdir()}
    return names == {path.name for path in current.iterdir()} and all(
        filecmp.cmp(made / name, current / name, shallow=False) for name in names
    )
