"""Weights that trainers offer as the next version, from their upload until the learner's process has answered.

    a file arrives → all files are there: the offer waits → the learner takes it → published, or refused

- The learner's process checks the weights, completes them to a policy folder and publishes that: the coordinator loads
  no weights. One offer is in hand at a time; the others wait in line.
- Offers are in memory only. If the coordinator ends, the trainer repeats its offer; if the learner's process ends, the
  next one gets the same offer again. Weights that are those of the newest version already change nothing.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.publishing.publish import OFFERED
from protocol.errors import NotFound, SwarmError
from protocol.work.learning import OfferOutcome


@dataclass(frozen=True)
class Offer:
    """Weights of a trainer, in a folder below `uploads/`."""

    identity: str
    updates: int
    """The training steps since the version before."""
    answer: asyncio.Future[int]
    """The version that has these weights."""


class OfferedVersions:
    """The offers of all trainers of a round."""

    def __init__(self, uploads: Path) -> None:
        self._folder = uploads / OFFERED
        self._line = asyncio.Lock()
        """Held by the offer that is in hand."""
        self._in_hand: Offer | None = None
        self._came = asyncio.Event()

    def file(self, key: int, digest: str) -> Path:
        """Return the place of a file that a key's holder sends."""
        return self._sent_by(key) / digest

    def folder(self, identity: str) -> Path:
        """Return the folder of an offer."""
        return self._folder / identity

    def forget_all(self) -> None:
        """Remove what an earlier coordinator has left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def publish(self, key: int, files: Mapping[str, str], updates: int) -> int:
        """Wait until the files of a key, digests by name, are published, and return the version."""
        offer = Offer(os.urandom(16).hex(), updates, asyncio.get_running_loop().create_future())
        folder = self.folder(offer.identity)
        try:
            await asyncio.to_thread(self._gather, key, files, folder)
            async with self._line:
                self._in_hand = offer
                self._came.set()
                return await offer.answer
        finally:
            if self._in_hand is offer:
                self._in_hand = None
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def next(self, patience_s: float) -> Offer | None:
        """Wait for an offer, and return it; the same one until it is answered."""
        try:
            async with asyncio.timeout(patience_s):
                while self._in_hand is None:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        return self._in_hand

    def answer(self, outcome: OfferOutcome) -> None:
        """Answer the trainer; nothing happens if it waits no more."""
        offer = self._in_hand
        if offer is None or offer.identity != outcome.offer or offer.answer.done():
            return
        self._in_hand = None
        if outcome.code:
            told = {"code": outcome.code, "message": outcome.message, "hint": outcome.hint}
            offer.answer.set_exception(SwarmError.from_wire(told))
        else:
            offer.answer.set_result(outcome.version)

    def _gather(self, key: int, files: Mapping[str, str], folder: Path) -> None:
        """Give the files of a key their names, in the folder of an offer."""
        folder.mkdir(parents=True)
        for name, digest in files.items():
            sent = self.file(key, digest)
            if not sent.is_file():
                raise NotFound(f"{name} was not sent with the digest {digest[:16]}….", hint="Send the file first.")
            (folder / name).hardlink_to(sent)
        shutil.rmtree(self._sent_by(key), ignore_errors=True)

    def _sent_by(self, key: int) -> Path:
        return self._folder / f"of-key-{key}"
