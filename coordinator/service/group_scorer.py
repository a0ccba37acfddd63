"""The group scorer: finds accepted groups without rewards, has them judged or played on, and stores the results.

- Waiting groups are read from the store, so a crash at any moment loses nothing.
- A group that fails is retried in a fresh process, `TRIES` times in all, and then given up with its reason.
- If groups fail one after the other, the cause is not in the groups: after `GIVEN_UP_MAX` in a row none is given up
  until one is judged. They wait, the status tells the operator, and since batches lack them, nodes get no more work
  than S allows.
- If nothing can be judged for now, such as with a judge whose budget is used up, groups wait in the same way.
- Failed groups are retried after all others, so that a group that no reward function can judge does not block a round.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from coordinator.config.task import EpisodeSection
from coordinator.rules.prompt_refs import PromptRef
from coordinator.service.waiting import WaitingRequests
from coordinator.store.state import Database
from coordinator.tasks.group_play import GroupPlay
from coordinator.tasks.reward_functions import Job
from coordinator.tasks.task_pool import TaskPool
from coordinator.tasks.task_process import TaskProcessSpec
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import scoring
from coordinator.transactions.leases import LeaseTerms
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.scoring import Unscored
from ledger.book import BookBroken
from protocol.errors import NotFound, VerifierDown, VerifierFailed
from protocol.tasks import Problem, Reward
from protocol.work.lease import Lease, Prefix

log = logging.getLogger(__name__)

T = TypeVar("T")

TRIES = 2
GIVEN_UP_MAX = 4
LOOK_AGAIN_S = 0.5
"""Time between two looks: groups accepted by another API process set no event here."""

PAUSE_S = 5.0
"""Pause between tries while no group can be judged."""


class PolicyText(Protocol):
    """Source of the policy's tokenizer and bounds."""

    async def text(self) -> TaskText: ...


class ScoredRound(Protocol):
    """The part of a round that the scorer uses."""

    database: Database
    audits: AuditTerms
    terms: LeaseTerms
    waiting: WaitingRequests

    @property
    def policy(self) -> PolicyText: ...


class GroupScorer:
    """The judging of all groups of a round; `problem` returns the problem of a group."""

    def __init__(
        self,
        round_: ScoredRound,
        spec: TaskProcessSpec,
        problem: Callable[[PromptRef], Problem],
        now_ms: Callable[[], int],
        *,
        episodes: EpisodeSection | None = None,
        pause_s: float = PAUSE_S,
        given_up_max: int = GIVEN_UP_MAX,
    ) -> None:
        self._round, self._spec, self._problem, self._now_ms = round_, spec, problem, now_ms
        self._pause_s, self._given_up_max = pause_s, given_up_max
        self._episodes = episodes or EpisodeSection()
        self._pool = TaskPool(spec)
        self._taken: set[str] = set()
        self._given_up = 0
        """Number of groups given up since the last judged one."""
        self._stands = ""
        """The reason why nothing is judged; empty if groups are."""
        self._halts = 0
        """Number of times that nothing could be judged: a group that began before the last one ends no halt."""
        self._put_off: set[str] = set()
        """Failed groups that were not given up, and wait until all others were tried."""
        self._leaves_some = False
        """True if the last look may have left groups for lack of places."""

    async def run(self) -> None:
        """Score groups until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._round.waiting.unscored.clear()
                    for unscored in await self._next_unscored():
                        self._taken.add(unscored.claim_id)
                        tasks.create_task(self._score(unscored))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_AGAIN_S):
                            await self._round.waiting.unscored.wait()
        finally:
            await self._pool.close()

    async def _next_unscored(self) -> list[Unscored]:
        """Return waiting groups that are not being judged, up to the number of free places."""
        free = 2 * self._spec.processes - len(self._taken)
        self._leaves_some = free <= 0
        if free <= 0:
            return []
        try:
            groups = await self._round.database.read(scoring.waiting, free, but=self._taken | self._put_off)
        except Exception:  # the store may be available again later
            log.exception("could not read the groups that wait for rewards")
            return []
        if not groups:
            self._put_off.clear()
        self._leaves_some = len(groups) >= free
        return groups

    async def _score(self, unscored: Unscored) -> None:
        """Judge one group; log any error instead of raising it."""
        try:
            await self._settle(unscored)
        except BookBroken:
            raise
        except Exception:  # the group waits in the store, and no failure of ours must end the coordinator
            log.exception("group=%d could not be scored", unscored.group_no)
            self._put_off.add(unscored.claim_id)
            await asyncio.sleep(self._pause_s)
        finally:
            self._taken.discard(unscored.claim_id)
            if self._leaves_some or self._put_off:  # else a look would delay the answer to the node for nothing
                self._round.waiting.unscored.set()

    async def _settle(self, unscored: Unscored) -> None:
        """Judge one group, or have its episodes go on, and store the result, or its failure if that is final."""
        halts = self._halts
        try:
            if unscored.episodes:
                await self._record_answer(unscored, *await self._play(unscored))
            else:
                rewards, rules = await self._judge(unscored), self._round.terms.selection
                await self._round.database.run(
                    scoring.scored, unscored.claim_id, rewards, rules=rules, now_ms=self._now_ms()
                )
            self._given_up = 0
            if halts == self._halts:
                self._go_on()
            self._round.waiting.batch_ready.set()
        except VerifierFailed as failure:
            await self._failed(unscored, failure)
        except VerifierDown as failure:
            await self._stand_still(failure.message, failure.hint)
        except NotFound:
            pass  # no version is published, so no group can be real

    async def _record_answer(self, unscored: Unscored, answer: list[Prefix], rewards: list[Reward | None]) -> None:
        """Store an environment's answer, and with the last one that a request waits for, lease it the next turns."""
        request = self._round.waiting.turns.request_due_with(unscored.claim_id)
        leases: tuple[Lease, ...] = ()
        try:
            leases = await self._round.database.run(
                scoring.answered_and_offered,
                unscored.claim_id,
                answer,
                rewards,
                offer=None if request is None else request.offer,
                rules=self._round.terms.selection,
                timeout_ms=self._round.terms.timeout_ms,
                now_ms=self._now_ms(),
            )
        finally:
            if request is not None:
                request.settle(leases)

    async def _judge(self, unscored: Unscored) -> list[Reward]:
        text = await self._round.policy.text()
        said = [text.judged_text(tokens) for tokens in unscored.completions]
        job = Job(self._problem(unscored.source), said, unscored.completions)
        rewards = await self._tried(lambda: self._pool.judge(job), unscored.group_no)
        return [text.in_tokens(reward, tokens) for reward, tokens in zip(rewards, unscored.completions, strict=True)]

    async def _play(self, unscored: Unscored) -> tuple[list[Prefix], list[Reward | None]]:
        """Return what the environment answers to the last turns of a group, and the rewards of ended episodes."""
        text = await self._round.policy.text()
        play = GroupPlay(unscored, self._problem(unscored.source), text, self._episodes)
        answers = await self._tried(lambda: self._pool.play(play.asked()), unscored.group_no)
        play.record(answers)
        if play.cut:
            play.record(await self._tried(lambda: self._pool.play(play.asked(cut=True)), unscored.group_no))
        return play.results()

    async def _tried(self, question: Callable[[], Awaitable[T]], group_no: int) -> T:
        for _ in range(TRIES - 1):
            try:
                return await question()
            except VerifierFailed as failure:
                if not self._stands:  # it was logged, and is tried every few seconds
                    log.warning("group=%d reward failed, retrying: %s", group_no, failure.detail)
        return await question()

    async def _failed(self, unscored: Unscored, failure: VerifierFailed) -> None:
        if self._given_up >= self._given_up_max:
            self._put_off.add(unscored.claim_id)
            reason = failure.message.removesuffix(".")
            await self._stand_still(f"{self._given_up_max} groups in a row could not be judged: {reason}.")
            return
        self._given_up += 1
        log.error("group=%d given up: %s", unscored.group_no, failure.detail)
        await self._round.database.run(
            scoring.give_up, unscored.claim_id, failure.message, audits=self._round.audits, now_ms=self._now_ms()
        )

    async def _stand_still(self, reason: str, next_step: str = "") -> None:
        """Record that nothing is judged, log it once for each reason, and wait."""
        if reason != self._stands:
            log.error("no rewards, groups wait until the reward works: %s", f"{reason} {next_step}".strip())
        self._stands, self._halts = reason, self._halts + 1
        await self._round.database.run(scoring.stand_still, reason, next_step, now_ms=self._now_ms())
        await asyncio.sleep(self._pause_s)

    def _go_on(self) -> None:
        """Log that groups are judged again, if none was."""
        if self._stands:
            log.info("groups are judged again")
        self._stands = ""
