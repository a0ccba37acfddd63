"""The scorer: finds accepted groups that wait for their rewards, has them judged, and stores what came of it.

- Nothing is promised in memory: what waits is read from the store, so a crash at any moment loses nothing.
- A group that fails is tried again in a fresh process, `TRIES` times in all, and then given up with its reason.
- If groups fail one after the other, that is no group's fault: after `GIVEN_UP_MAX` in a row none is given up until one
  was judged. They wait, the operator is told, and since a batch lacks them, nodes get no more work than S allows.
- What failed so comes up again behind all others: nobody holds up a round with what no reward can judge.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from coordinator.store.state import Database
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.reward_pool import RewardPool
from coordinator.tasks.reward_process import RewardSpec
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from coordinator.transactions.leases import LeaseTerms
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.prompts import PromptRef
from coordinator.transactions.scoring import Unscored
from ledger.book import BookBroken
from protocol.errors import NotFound, VerifierDown, VerifierFailed
from protocol.tasks import Problem, Reward

log = logging.getLogger(__name__)

TRIES = 2
GIVEN_UP_MAX = 4
LOOK_AGAIN_S = 0.5
"""What another API process accepted is not told here."""

PAUSE_S = 5.0
"""Between tries while nothing can be judged."""


class Here(Protocol):
    """What the scorer needs of a round."""

    database: Database
    audits: AuditTerms
    terms: LeaseTerms
    unscored: asyncio.Event
    batch_ready: asyncio.Event

    async def text(self) -> TaskText: ...


class RewardScorer:
    """All judging of one round; `problem` is what a group is about."""

    def __init__(
        self,
        here: Here,
        spec: RewardSpec,
        problem: Callable[[PromptRef], Problem],
        now_ms: Callable[[], int],
        *,
        pause_s: float = PAUSE_S,
        given_up_max: int = GIVEN_UP_MAX,
    ) -> None:
        self._here, self._spec, self._problem, self._now_ms = here, spec, problem, now_ms
        self._pause_s, self._given_up_max = pause_s, given_up_max
        self._pool = RewardPool(spec)
        self._taken: set[str] = set()
        self._given_up = 0
        """Since the last group that was judged."""
        self._put_off: set[str] = set()
        """What failed, was not given up, and waits until all others had their turn."""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._here.unscored.clear()
                    for waiting in await self._look():
                        self._taken.add(waiting.claim_id)
                        group.create_task(self._score(waiting))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await self._here.unscored.wait()
        finally:
            await self._pool.close()

    async def _look(self) -> list[Unscored]:
        """What waits, and is in nobody's hands, as far as there are hands for it."""
        free = 2 * self._spec.processes - len(self._taken)
        if free <= 0:
            return []
        try:
            found = await self._here.database.read(scoring.waiting, free, but=self._taken | self._put_off)
        except Exception:  # a store that is away comes back
            log.exception("could not read the groups that wait for rewards")
            return []
        if not found:
            self._put_off.clear()
        return found

    async def _score(self, waiting: Unscored) -> None:
        """Judge one group, whatever happens."""
        try:
            await self._settle(waiting)
        except BookBroken:
            raise
        except Exception:  # the group waits in the store, and no failure of ours must end the coordinator
            log.exception("group=%d could not be scored", waiting.group_no)
            self._put_off.add(waiting.claim_id)
            await asyncio.sleep(self._pause_s)
        finally:
            self._taken.discard(waiting.claim_id)
            self._here.unscored.set()

    async def _settle(self, waiting: Unscored) -> None:
        """Judge one group, and store that; where it fails for good, store that."""
        try:
            rewards = await self._judge(waiting)
            rules = self._here.terms.selection
            await self._here.database.run(scoring.scored, waiting.claim_id, rewards, rules=rules, now_ms=self._now_ms())
            self._given_up = 0
            self._here.batch_ready.set()
        except VerifierFailed as failure:
            await self._failed(waiting, failure)
        except VerifierDown as failure:
            await self._stand_still(failure.message)
        except NotFound:
            pass  # no version is published: whose could it be?

    async def _judge(self, waiting: Unscored) -> list[Reward]:
        text = await self._here.text()
        said = [text.judged_text(tokens) for tokens in waiting.completions]
        job = Job(self._problem(waiting.source), said, waiting.completions)
        rewards = await self._tried(job, waiting.group_no)
        return [text.in_tokens(reward, tokens) for reward, tokens in zip(rewards, waiting.completions, strict=True)]

    async def _tried(self, job: Job, group_no: int) -> list[Reward]:
        for _ in range(TRIES - 1):
            try:
                return await self._pool.judge(job)
            except VerifierFailed as failure:
                log.warning("group=%d reward failed, retrying: %s", group_no, failure.message)
        return await self._pool.judge(job)

    async def _failed(self, waiting: Unscored, failure: VerifierFailed) -> None:
        if self._given_up >= self._given_up_max:
            self._put_off.add(waiting.claim_id)
            await self._stand_still(f"{self._given_up_max} groups in a row could not be judged. {failure.message}")
            return
        self._given_up += 1
        log.error("group=%d given up: %s", waiting.group_no, failure.message)
        await self._here.database.run(
            scoring.give_up, waiting.claim_id, failure.message, audits=self._here.audits, now_ms=self._now_ms()
        )

    async def _stand_still(self, reason: str) -> None:
        log.error("no rewards: %s", reason)
        await self._here.database.run(scoring.stand_still, reason, now_ms=self._now_ms())
        await asyncio.sleep(self._pause_s)
