"""The engines of this machine behind one interface: one child for each card, or for joined cards, or for the CPU.

- Groups are spread over the cards by their speed. A turn of an episode goes to the card that sampled the turn before,
  which may have kept its rows.
- Each card has a task that loads the policy into its child, measures its speed, and ends the child. A failed card is
  tried again after a pause, and the others continue.
- A card that fails costs only its own groups: they are sampled again on another card, and a group that was lost
  `DEATHS_MAX` times fails. If no other card is left, the failure is the caller's, as with one engine.
- A card that the owner pauses hands its groups to the others at once; one that rests for another reason finishes them.
- A moved group continues after the tokens that it has reported: so what the node has reported stays true.
- All cards of a node sample in one class of numerics, the one of the first card; a card with another one is left out.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from protocol import limits
from protocol.errors import EngineFailed, SwarmError
from swarm_node.base.waiting import Interrupt
from swarm_node.engine.card_engine import (
    UNLIMITED,
    CardEngine,
    CardPermit,
    LoadTarget,
    PlacedGroup,
    joined_permit,
)
from swarm_node.engine.cards import EngineCard
from swarm_node.engine.client import Choose, EngineClient
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, Loaded, SampleRequest
from swarm_node.engine.throughput import SampleWork, Throughput, measure

log = logging.getLogger(__name__)

DEATHS_MAX = 2
"""Cards that may fail under one group before it is reported as failed: the group may be the cause."""

CARD_FAILURES_MAX = 4
"""Failures of a card in a row with one version; then it waits for the next version."""

CARD_PAUSES_S = (2.0, 10.0, 30.0)
"""Pauses after the first, second … failure of a card in a row: an overheated card or a restarting driver needs time."""

EPISODES_MAX = 4096
"""Episodes whose card is remembered; more would only lose the rows that the card has kept."""


class EnginePool:
    """All engines of this machine; created by `open_pool`."""

    def __init__(self, engines: Sequence[CardEngine]) -> None:
        self._engines = tuple(engines)
        self._target: LoadTarget | None = None
        self._turn = trio.Lock()
        self._waiting: list[PlacedGroup] = []
        """Groups that no card has yet."""
        self._answers: deque[GroupGrown | GroupDone | GroupFailed] = deque()
        self._news = trio.Event()
        """Set and replaced when anything has changed."""
        self._episodes: OrderedDict[int, CardEngine] = OrderedDict()
        """The card of each episode's last turn, by the seed of its leases."""

    # --- what the worker uses -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the engine; empty before the first policy."""
        return next((engine.client.name for engine in self._engines if engine.client.name), "")

    def speed_with(self, choose: Choose | None = None) -> float:
        """Return the sum of the last speeds of all cards that may work, with the policies that `choose` was loaded for.

        A card that was not measured with them counts like the mean of the others: it may have rested at the time.
        """
        is_loaded = self._target is not None and self._target.choose == choose
        used = [engine for engine in self._engines if not engine.card.left_out]
        cards = [card for card in used if card.permit.may_work and not (is_loaded and self._is_barred(card))] or used
        known = [speed for card in cards if (speed := card.speeds.get(choose, 0.0))]
        return sum(known) * len(cards) / len(known) if known else 0.0

    @property
    def starts(self) -> int:
        """Children started so far, on all cards."""
        return sum(engine.client.starts for engine in self._engines)

    @property
    def cards_ready(self) -> int:
        """Number of cards that sample or could, at least one: each runs as many groups as one engine."""
        return max(1, len(self._ready()))

    async def load(
        self, folder: Path, version: int, warm_up: SampleWork | None = None, choose: Choose | None = None
    ) -> Loaded:
        """Load a policy on every card that may work; raise the first error if no card could.

        `choose` chooses the engine in place of the pool's choice, for the policies of one round.
        """
        async with self._turn:
            self._drop_groups()
            self._target = target = LoadTarget(folder, version, warm_up, choose)
            for engine in self._engines:
                engine.failures = 0
                engine.stop_preparing()
            self._stir()
            while True:
                news, working = self._news, self._working()
                if working and all(engine.tried is target for engine in working):
                    break
                await news.wait()
            ready = self._ready()
            if not ready:
                raise _last_error(working)
            first = ready[0].result
            assert first is not None
            target.numerics = first.numerics
            for engine in ready:
                self._check_class(engine, target)
            return first

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Spread requests over the cards; `finished` returns them in the order in which they end."""
        async with self._turn:
            if not self._ready():
                self._try_again()
            self._waiting += [PlacedGroup(request) for request in requests]
            await self._place()

    async def finished(self, interrupted: Interrupt | None = None) -> GroupGrown | GroupDone | GroupFailed | None:
        """Return the next request that ended, or that grew and asked for reports.

        Return None if no request is left, or if `interrupted` is set first.
        """
        async with self._turn:
            while True:
                await self._place()
                if self._answers:
                    return self._answers.popleft()
                if not self._waiting and not any(engine.groups for engine in self._engines):
                    return None
                if interrupted is not None and interrupted.is_set():
                    return None
                await self._await_news(interrupted)

    async def cancel(self, request_ids: Collection[str]) -> None:
        """Cancel requests, also while another task awaits them."""
        gone = set(request_ids)
        self._waiting = [group for group in self._waiting if group.request.request_id not in gone]
        for engine in self._engines:
            own = engine.groups.keys() & gone
            for name in own:
                del engine.groups[name]
            engine.unwanted |= own
        self._stir()
        for engine in self._engines:
            await self._cancel_unwanted(engine)

    async def rest(self) -> None:
        """End all children to free their memory, and drop all requests. The next load starts new children."""
        async with self._turn:
            self._drop_groups()
            self._target = None
            for engine in self._engines:
                engine.stop_preparing()
            self._stir()
            while True:
                news = self._news
                if all(engine.client.pid is None and engine.preparing is None for engine in self._engines):
                    return
                await news.wait()

    # --- what the owner uses ------------------------------------------------------------------------------------------

    def steer(self, permits: Mapping[int, CardPermit]) -> None:
        """Apply the owner's permissions by card number; a card without one may work. Joined cards rest together."""
        for engine in self._engines:
            engine.permit = joined_permit([permits.get(number, UNLIMITED) for number in engine.card.numbers])
            if not engine.permit.may_work and engine.permit.at_once:
                engine.unwanted |= engine.groups.keys()
                self._move_groups(engine, failed=False)
                engine.stop_preparing()
        self._stir()

    def states(self) -> list[dict[str, Any]]:
        """Return the state of every named card as plain values; the first of joined cards has their figures."""
        return [
            engine.card_state(number) for engine in self._engines if engine.card.name for number in engine.card.numbers
        ]

    async def changes(self) -> None:
        """Return when the state of a card or of a group has changed."""
        await self._news.wait()

    # --- placing groups -----------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        """Give the waiting groups to cards; raise the last error if every card that may work has failed."""
        while self._waiting:
            ready = self._ready() or [engine for engine in self._engines if self._may_finish(engine)]
            if not ready and not await self._await_ready():
                return
            batches: dict[CardEngine, list[PlacedGroup]] = {}
            while ready and self._waiting:
                group = self._waiting.pop(0)
                engine = self._choose_card(group, ready)
                engine.groups[group.request.request_id] = group
                batches.setdefault(engine, []).append(group)
            for engine, groups in batches.items():
                await self._submit(engine, groups)

    def _choose_card(self, group: PlacedGroup, ready: Sequence[CardEngine]) -> CardEngine:
        """Return the card of the episode, otherwise the one that would have the least to do for its speed."""
        request = group.request
        known = self._episodes.get(request.seed) if request.turn_tokens_max else None
        engine = known if known in ready else min(ready, key=lambda one: one.load_share(1))
        assert engine is not None
        if request.turn_tokens_max:
            self._episodes[request.seed] = engine
            self._episodes.move_to_end(request.seed)
            if len(self._episodes) > EPISODES_MAX:
                self._episodes.popitem(last=False)
        return engine

    async def _submit(self, engine: CardEngine, groups: Sequence[PlacedGroup]) -> None:
        """Pass groups to a card's child, in frames of the protocol's limit."""
        for start in range(0, len(groups), limits.LEASES_PER_REQUEST_MAX):
            batch = groups[start : start + limits.LEASES_PER_REQUEST_MAX]
            here = [group for group in batch if engine.groups.get(group.request.request_id) is group]
            try:
                if here:
                    await engine.client.submit([group.continued() for group in here])
            except SwarmError as error:
                self._fail_if_loaded(engine, error)

    async def _await_ready(self) -> bool:
        """Wait until a card is ready; return False if none may work, raise an error if all that may have failed."""
        if self._target is None:
            self._waiting.clear()
            raise EngineFailed("No policy is loaded.", hint="Load a policy before generating.")
        while True:
            news, working = self._news, self._working()
            if self._ready():
                return True
            if not working:
                return False
            if all(engine.tried is self._target for engine in working):
                self._waiting.clear()
                raise _last_error(working)
            await news.wait()

    def _try_again(self) -> None:
        """Let the failed cards try again without their pause: no other card is left."""
        for engine in self._engines:
            if engine.permit.may_work and not engine.card.left_out:
                engine.tried = engine.barred = None
        self._stir()

    def _move_groups(self, engine: CardEngine, *, failed: bool) -> None:
        """Take all groups from a card, for the others to continue."""
        groups, engine.groups = list(engine.groups.values()), {}
        for group in groups:
            group.deaths += failed
            if group.deaths > DEATHS_MAX:
                said = engine.error.message if engine.error else ""
                error = EngineFailed(f"The engine failed {group.deaths} times with this group. The last time: {said}")
                self._answers.append(GroupFailed.from_error(group.request.request_id, error))
            else:
                self._waiting.append(group)

    def _drop_groups(self) -> None:
        self._waiting.clear()
        self._answers.clear()
        for engine in self._engines:
            engine.unwanted |= engine.groups.keys()
            engine.groups.clear()

    # --- hearing from cards -------------------------------------------------------------------------------------------

    async def _await_news(self, interrupted: Interrupt | None) -> None:
        """Wait for an answer of any card, for a change, or for `interrupted`."""
        news = self._news

        async def stop_when_interrupted(event: Interrupt) -> None:
            await event.wait()
            self._stir()

        async with trio.open_nursery() as outer:
            if interrupted is not None:
                outer.start_soon(stop_when_interrupted, interrupted)
            async with trio.open_nursery() as nursery:
                for engine in self._engines:
                    if engine.groups:
                        nursery.start_soon(self._hear_card, engine, news)
                nursery.start_soon(news.wait)
            outer.cancel_scope.cancel()

    async def _hear_card(self, engine: CardEngine, news: trio.Event) -> None:
        try:
            answer = await engine.client.finished(news)
        except SwarmError as error:
            self._fail_if_loaded(engine, error)
            return
        if answer is not None:
            self._keep_answer(engine, answer)
        elif news.is_set():
            return
        elif engine.groups:
            self._fail_if_loaded(engine, EngineFailed("The engine has lost its requests."))
        self._stir()

    def _keep_answer(self, engine: CardEngine, answer: GroupGrown | GroupDone | GroupFailed) -> None:
        """Keep the answer of a card for `finished`; the answer to a cancelled request is dropped."""
        group = engine.groups.get(answer.request_id)
        if group is None:
            return
        if isinstance(answer, GroupGrown):
            self._answers.append(group.grew(answer))
            return
        del engine.groups[answer.request_id]
        if isinstance(answer, GroupDone):
            engine.failures, engine.error = 0, None
            answer = group.done(answer)
        self._answers.append(answer)

    def _fail_if_loaded(self, engine: CardEngine, error: SwarmError) -> None:
        """Record a failure during sampling, once: several calls may meet the same dead child."""
        if engine.loaded is not None:
            self._fail(engine, error, self._target)

    def _fail(self, engine: CardEngine, error: SwarmError, target: LoadTarget | None) -> None:
        """Record a card's failure, and take its groups."""
        engine.loaded, engine.tried, engine.error = None, target, error
        engine.failures += 1
        pause_s = limits.retry_pause_s(engine.failures - 1, CARD_PAUSES_S)
        engine.retry_at = trio.current_time() + pause_s
        if engine.failures >= CARD_FAILURES_MAX:
            engine.barred = target
        lost = len(engine.groups)
        log.warning("%s failed times=%d groups=%d: %s", engine.label, engine.failures, lost, error)
        self._move_groups(engine, failed=True)
        self._stir()

    # --- the task of each card ----------------------------------------------------------------------------------------

    async def keep(self, engine: CardEngine) -> None:
        """Bring a card into the state that is wanted, until cancelled."""
        while True:
            news = self._news
            if engine.unwanted:
                await self._cancel_unwanted(engine)
            elif self._must_end(engine):
                engine.loaded = engine.tried = None
                await engine.client.rest()
                self._stir()
            elif self._must_prepare(engine):
                await self._prepare(engine)
            else:
                with trio.CancelScope(deadline=engine.retry_at if self._is_pausing(engine) else math.inf):
                    await news.wait()

    async def _prepare(self, engine: CardEngine) -> None:
        """Load the target, and measure the speed if it is not known."""
        target = self._target
        assert target is not None
        engine.tried = None
        with trio.CancelScope() as engine.preparing:
            try:
                await self._measure_last(engine)
                engine.loaded = None
                engine.result = await engine.client.load(target.folder, target.version, target.choose)
                if engine.result.rebuilt:  # a model of the same shape has the same speed, whatever its round
                    engine.tokens_per_s = engine.speeds.get(target.choose, 0.0)
                if not engine.tokens_per_s and target.warm_up:
                    requests = await target.warm_up.requests(engine.client, target.version)
                    measured = await measure(engine.client, requests, at_once=target.warm_up.groups)
                    engine.tokens_per_s = measured.tokens_per_s
                    log.info("measured the throughput of %s tokens_per_s=%.0f", engine.label, engine.tokens_per_s)
                engine.speeds[target.choose] = engine.tokens_per_s
            except SwarmError as error:
                self._fail(engine, error, target)
            else:
                engine.loaded = engine.tried = target
                self._check_class(engine, target)
        engine.preparing = None
        self._stir()

    async def _measure_last(self, engine: CardEngine) -> None:
        """Update the speed by the groups since the last load."""
        if engine.loaded is not None:
            measured = Throughput.of(await engine.client.measured())
            engine.tokens_per_s = measured.tokens_per_s or engine.tokens_per_s
            engine.speeds[engine.loaded.choose] = engine.tokens_per_s

    def _check_class(self, engine: CardEngine, target: LoadTarget) -> None:
        """Leave a card out while its class of numerics is not the node's: a lease is answered in one class."""
        if error := engine.class_error(target.numerics):
            engine.loaded, engine.barred, engine.error = None, target, error
            log.warning("%s is left out: %s", engine.label, error)

    async def _cancel_unwanted(self, engine: CardEngine) -> None:
        names, engine.unwanted = engine.unwanted, set()
        try:
            if names:
                await engine.client.cancel(names)
        except SwarmError as error:
            self._fail_if_loaded(engine, error)

    def _working(self) -> list[CardEngine]:
        """Return the cards that may work with the target."""
        return [
            engine
            for engine in self._engines
            if engine.permit.may_work and not engine.card.left_out and (not self._target or not self._is_barred(engine))
        ]

    def _ready(self) -> list[CardEngine]:
        """Return the cards that may work and have loaded the target."""
        return [engine for engine in self._working() if engine.loaded is not None and engine.loaded is self._target]

    def _may_finish(self, engine: CardEngine) -> bool:
        """Return True if a resting card may end what it has: for groups that no other card takes."""
        return engine.loaded is not None and engine.loaded is self._target and not engine.permit.at_once

    def _is_barred(self, engine: CardEngine) -> bool:
        return self._target is not None and engine.barred is self._target

    def _must_end(self, engine: CardEngine) -> bool:
        """Return True if the child should free its memory."""
        wanted = self._target is not None and not self._is_barred(engine)
        rests = not engine.permit.may_work and not engine.permit.keep_engine
        return engine.client.pid is not None and not engine.groups and (rests or not wanted)

    def _must_prepare(self, engine: CardEngine) -> bool:
        """Return True if the card should load the target now."""
        lacks = self._target is not None and engine.loaded is not self._target and not engine.groups
        return lacks and engine in self._working() and not self._is_pausing(engine)

    def _is_pausing(self, engine: CardEngine) -> bool:
        """Return True during the pause after a failure."""
        return engine.tried is self._target and engine.loaded is None and trio.current_time() < engine.retry_at

    def _stir(self) -> None:
        """Wake everyone who waits for a change."""
        news, self._news = self._news, trio.Event()
        news.set()


@asynccontextmanager
async def open_pool(
    command: Sequence[str] | Choose,
    cards: Sequence[EngineCard] = (EngineCard(),),
) -> AsyncIterator[EnginePool]:
    """Open the engines of all cards for the duration of the block; each child starts with the first load."""
    used = max(1, sum(not card.left_out for card in cards))
    engines = [
        CardEngine(
            card,
            EngineClient(command, environment=card.environment, children=used, cards=len(card.numbers)),
        )
        for card in cards
    ]
    pool = EnginePool(engines)
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(engine.client.watch)
            nursery.start_soon(pool.keep, engine)
        try:
            yield pool
        except Exception as error:  # raised below, outside of the nursery, which would wrap it
            failed = error
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as closing:
                    for engine in engines:
                        closing.start_soon(engine.client.close)
    if failed is not None:
        raise failed


def _last_error(engines: Sequence[CardEngine]) -> EngineFailed:
    """Return the error of cards that have all failed."""
    errors = [engine.error for engine in engines if isinstance(engine.error, EngineFailed)]
    if len({error.message for error in errors}) == 1:
        return errors[0]
    return EngineFailed("; ".join(error.message for error in errors) or "No card could load the policy.")
