"""Decisions about which missing chunk to request from which source. No I/O; time and randomness are arguments.

- The plan divides a version's chunks into stripes and names the upstreams to ask first for each stripe, its *parents*.
  A parent is asked in the version's order even for chunks that it does not hold yet: those WANTs wait there, and the
  chunk is sent as soon as the parent has it.
- The seeder is asked for the chunks that the fewest peers hold, at random among equals: so peers soon have different
  chunks to exchange.
- A faster source takes over from a slower one: a chunk whose parents fall behind is requested from a source that holds
  it and would finish its own part earlier at its current pace, the rarest chunk first. A stalled parent falls behind
  by itself, so work moves around slow, stalled and lost links, whatever the plan assumed.
- A node with less of the version than its peers requests all chunks it can, and reports this; others wait for it.
- In a large swarm a chunk passes many hops: sources count as late later, and the seeder helps no faster than planned.
- A source has two outstanding chunks that it can send; more while its link is idle between chunks, since queues on the
  path delay a WANT as long as several chunks.
- A takeover starts with a CANCEL: the other source is asked when the first one confirms that it sends nothing, or is
  silent. So a chunk that was about to be sent arrives once; if it begins to arrive, the other source is not asked.
- When every chunk is requested, an idle source takes over chunks that wait for their turn at other sources.
- A WANT without an answer within `overdue_factor` times that source's usual time, counted from the first bytes if some
  arrived, is requested from another source at once. The late source gets a CANCEL if it has not begun.
- A source that is silent for several times its usual answer time loses its turn (`survey`): chunks that others hold
  are requested from them at once, and the source is asked again after its next message.
- The origin is the last resort. Every chunk is delivered, or `hopeless` returns True (`survey`).
- A source that refused, failed or disconnected pauses, longer each time up to a limit. Disconnecting without an open
  request is no failure; a refusal by the origin is one. After `strikes_max` failures without a delivery the source is
  `down`: it comes last, and gets one request at a time until it delivers a chunk. A source that lied is never asked
  again.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from protocol.ids import ChunkId
from protocol.wire.frames import Reason
from swarm_node.picker.sources import ChunkSource, PickerRules, PlanPace, SourceState, deal, sample_fitting
from swarm_node.picker.survey import Hearing, Survey, hopeless, lacking_elsewhere, look_around, needs_origin


@dataclass(frozen=True)
class Ask:
    """Order: request this chunk from this source now."""

    source: str
    chunk: ChunkId


@dataclass(frozen=True)
class TakeBack:
    """Order: cancel this WANT, since another source has delivered the chunk or will do so sooner."""

    source: str
    chunk: ChunkId


class Picker:
    """State of fetching one version: `next` returns orders, the other methods report their results."""

    def __init__(
        self,
        chunks: Sequence[ChunkId],
        missing: Iterable[ChunkId],
        sources: Iterable[ChunkSource],
        *,
        rng: Random,
        now: float,
        stripes: int = 1,
        rules: PickerRules | None = None,
        blames: Mapping[str, int] | None = None,
        pace: PlanPace | None = None,
    ) -> None:
        self._rules, self._rng, self._blames = rules or PickerRules(), rng, blames or {}
        self._chunks, self._missing = chunks, dict.fromkeys(missing)
        self._places = {chunk: place for place, chunk in enumerate(self._missing)}
        """Position of each chunk among those missing at the start."""
        self._askers: dict[ChunkId, dict[str, None]] = {chunk: {} for chunk in self._missing}
        self._unasked = dict.fromkeys(chunk for chunk in chunks if chunk in self._missing)
        self._copies: Counter[ChunkId] = Counter()
        """Number of peers that announced a chunk."""
        self._states: dict[str, SourceState] = {}
        self._heirs: dict[ChunkId, SourceState] = {}
        """The source to ask next for a chunk that was taken back."""
        self._parents: dict[ChunkId, list[SourceState]] = {}
        self.follow(sources, stripes=stripes, pace=pace or PlanPace())
        self._help_at = now + rng.uniform(0, self._pace.help_s)
        self._patient_until = now + self._pace.lag_s
        self._orders: dict[Ask | TakeBack, None] = {}
        """Orders that `next` has not returned yet."""
        self._survey, self._hearing = Survey(), Hearing(now, from_s=self._patient_until)
        self._progress_at = now

    def follow(self, sources: Iterable[ChunkSource], *, stripes: int, pace: PlanPace) -> None:
        """Follow this plan from now on: its sources are asked at once, and other sources no longer."""
        self._pace, named = pace, {source.name: source for source in sources}
        for name in self._states.keys() - named.keys():
            self._states[name].leave()
            self._drop_reservations(self._states[name])
        for name, source in named.items():
            blames = self._blames.get(name, 0)
            self._states.setdefault(name, SourceState(source, blames, self._rules.window)).join(source)
        self._parents |= deal(self._chunks, self._missing, self._states.values(), stripes)

    @property
    def missing(self) -> int:
        """Number of chunks that are not delivered yet."""
        return len(self._missing)

    @property
    def is_behind(self) -> bool:
        """True if other nodes have more of the version than this node."""
        at_first, rules = len(self._places), self._rules
        mine = at_first - len(self._missing)
        return mine + max(rules.behind * at_first, rules.behind_chunks) < self._survey.typical_told

    def busy_s(self, name: str) -> float | None:
        """Return the time for which a source was sending, in seconds; None if unknown."""
        return self._states[name].busy_s

    def is_able(self, name: str, now: float) -> bool:
        """Return True if a source neither pauses nor has lied, so that a connection to it is useful."""
        return self._states[name].is_able(now)

    def hopeless(self, now: float) -> bool:
        """Return True if no source can be expected to deliver anything."""
        silence_s = now - self._progress_at
        return bool(self._missing) and hopeless(self._states.values(), silence_s, self._rules, self._pace)

    def next(self, now: float) -> list[Ask | TakeBack]:
        """Return all orders that are due: peers first, and the least blamed first among equals."""
        if now >= self._survey.until:
            states, at_end = self._states.values(), not self._unasked
            self._survey = look_around(states, self._missing, self._rules, self._pace, at_end=at_end, now=now)
            for state in self._hearing.advance(states, now, self._rules):
                self._skip_silent(state, now)
        able = [state for state in self._states.values() if state.is_able(now) and not state.is_silent]
        self._rng.shuffle(able)
        for state in sorted(able, key=lambda state: (state.down, state.rank)):
            while chunk := self._choose(state, now):
                self._ask(state, chunk, now)
        orders, self._orders = list(self._orders), {}
        return orders

    def wake_at(self, now: float) -> float:
        """Return the time at which `next` may have new orders although nothing was reported."""
        return now + self._rules.look_s

    def had(self, name: str, chunks: Iterable[ChunkId], now: float) -> bool:
        """Record that a peer announced chunks; return True if that may change its orders now."""
        state = self._states[name]
        self.record_arrival(name, now)
        state.lost = False
        for chunk in chunks:
            if chunk in self._places:
                state.told |= 1 << self._places[chunk]
            if chunk in self._missing and chunk not in state.has:
                state.has.add(chunk)
                self._copies[chunk] += 1
                if chunk in state.asked:
                    state.owe(chunk, now)
                state.planned.pop(chunk, None)
                (state.offers if state in self._parents[chunk] else state.extras).append(chunk)
        return state.ready < state.window

    def record_arrival(self, name: str, at: float) -> None:
        """Record that a message or bytes of a source arrived."""
        state = self._states[name]
        self._hearing.record_word(state, at)
        if not state.fell_silent:
            for chunk in state.taken_back & state.begun.keys():  # begun before the silence
                state.taken_back.remove(chunk)
                self._unasked.pop(chunk, None)

    def began(self, name: str, chunk: ChunkId, now: float) -> bool:
        """Record the first bytes of a chunk; return True if that may change the orders of other sources now."""
        state, has_heir = self._states[name], chunk in self._heirs
        self.record_arrival(name, now)
        self._unreserve(chunk)
        if chunk in state.asked:
            self._unasked.pop(chunk, None)
            state.begin(chunk, now, self._rules)
        if state.asked.get(chunk) == math.inf:
            state.owe(chunk, now)
            self._take_back_all(chunk, but=name)
        return has_heir or bool(self._orders)

    def delivered(self, name: str, chunk: ChunkId, now: float) -> bool:
        """Record that the chunk is verified and stored; return True if it was still missing."""
        self.record_arrival(name, now)
        self._states[name].settle(chunk, now)
        self._progress_at = now
        if chunk not in self._missing:
            return False
        del self._missing[chunk]
        self._unasked.pop(chunk, None)
        self._survey.overdue.pop(chunk, None)
        self._take_back_all(chunk, but=name)
        del self._askers[chunk]
        del self._copies[chunk]
        for state in self._states.values():
            state.has.discard(chunk)
        self._unreserve(chunk)
        for parent in self._parents[chunk]:
            parent.backlog -= 1
            parent.planned.pop(chunk, None)
        return True

    def refused(self, name: str, chunk: ChunkId, reason: Reason, now: float) -> None:
        """Record an answer without the chunk; the source pauses, longer each time."""
        state = self._states[name]
        self.record_arrival(name, now)
        state.release(chunk)
        if reason is Reason.ABSENT:
            if chunk in state.has:
                self._forget_holdings(state, [chunk])
            state.lack(chunk)
        self._reopen(chunk, name)
        if reason is Reason.CANCELLED:
            state.owing_since = state.owing_since if state.asked else None
        elif now >= state.paused_until:  # once per burst of answers
            rest = state.strike if state.source.kind == "origin" else state.pause  # an origin must not refuse
            rest(now, self._rules, self._rng)
            self._drop_reservations(state)

    def failed(self, name: str, now: float) -> None:
        """Record that the source is lost for now; all chunks requested from it are open again."""
        self._states[name].strike(now, self._rules, self._rng)
        self._write_off(self._states[name])

    def parted(self, name: str, now: float) -> None:
        """Record that the source closed an idle stream, which is a failure only if it owed a chunk."""
        state = self._states[name]
        (state.strike if state.asked else state.pause)(now, self._rules, self._rng)
        self._write_off(state)

    def lied(self, name: str, now: float) -> None:
        """Record that the source sent wrong bytes; it is never asked again for this version."""
        self._states[name].gone = True
        self.failed(name, now)

    def _choose(self, state: SourceState, now: float) -> ChunkId | None:
        """Return the next chunk to request from this source."""
        if state.down and state.asked:
            return None
        if chunk := self._freed(state, now):
            return chunk
        if state.ready + len(state.reserved) < state.window:
            if chunk := self._rarest(state):
                return chunk
            if chunk := self._overdue(state, now):
                return chunk
            if chunk := self._taken_over(state, now) or self._queued_elsewhere(state, now):
                self._reserve(state, chunk, now)
                if chunk := self._freed(state, now):
                    return chunk
        may_wait = len(state.asked) - min(state.ready, state.window) < self._rules.waits
        if may_wait and not state.holds_all:
            return next(state.to_come(self._unasked), None)
        return None

    def _ask(self, state: SourceState, chunk: ChunkId, now: float) -> None:
        self._unreserve(chunk)
        self._take_back_all(chunk)
        self._unasked.pop(chunk, None)
        self._survey.overdue.pop(chunk, None)
        self._askers[chunk][state.source.name] = None
        if state.owing_since is None:
            state.owing_since = max(now, self._patient_until)
        state.owe(chunk, now if state.can_answer(chunk) else math.inf)
        self._orders[Ask(state.source.name, chunk)] = None

    def _reserve(self, state: SourceState, chunk: ChunkId, now: float) -> None:
        """Take a chunk back from the sources that have not begun it, and reserve it for this source."""
        self._heirs[chunk] = state
        state.reserved[chunk] = now
        self._unasked.pop(chunk, None)
        self._take_back_all(chunk)

    def _freed(self, state: SourceState, now: float) -> ChunkId | None:
        """Return a chunk reserved for this source that the previous sources have given up, or do not answer about."""
        for chunk, since in state.reserved.items():
            askers = [self._states[name] for name in self._askers[chunk]]
            unheard = all(asker.is_silent or self._is_mute(asker, now) for asker in askers)
            if unheard or now >= since + self._rules.confirm_s:
                return chunk
        return None

    def _unreserve(self, chunk: ChunkId) -> None:
        if heir := self._heirs.pop(chunk, None):
            del heir.reserved[chunk]

    def _take_back_all(self, chunk: ChunkId, but: str | None = None) -> None:
        for name in [name for name in self._askers.get(chunk, ()) if name != but]:
            self._take_back(name, chunk)

    def _take_back(self, name: str, chunk: ChunkId) -> None:
        """Cancel a request unless the chunk is already arriving; drop the order if it was not sent yet."""
        state = self._states[name]
        if Ask(name, chunk) in self._orders:
            del self._orders[Ask(name, chunk)], self._askers[chunk][name]
            state.release(chunk)
            state.owing_since = state.owing_since if state.asked else None
        elif chunk in state.asked and chunk not in state.taken_back and chunk not in state.begun:
            state.taken_back.add(chunk)
            self._orders[TakeBack(name, chunk)] = None

    def _rarest(self, state: SourceState) -> ChunkId | None:
        """Return the rarest of a few chunks that are not requested yet, at random among equals."""
        if state.holds_all:
            options = list(islice(state.to_come(self._unasked), self._rules.outlook))
        else:
            options = self._draw(state, state.offers, lambda chunk: chunk in self._unasked and chunk not in state.asked)
        return min(options, key=lambda chunk: (self._copies[chunk], self._rng.random()), default=None)

    def _taken_over(self, state: SourceState, now: float) -> ChunkId | None:
        """Return a chunk whose parents would finish much later than this source."""
        if state.source.kind == "origin" and not self._needs_origin(now):
            return lacking_elsewhere(state, self._states.values(), self._unasked)
        if now < state.look_again_at:
            return None
        if state.source.kind == "seeder" and now < self._help_at:
            # Chunks without a working parent are the seeder's own part, as if the plan named no parent: no pacing.
            return min(self._waiting(state, lambda chunk: self._is_orphan(chunk, now), now), default=None)
        worthwhile = self._worth_taking(state, now)
        if not worthwhile:
            state.look_again_at = now + self._rules.look_s
        elif state.source.kind == "seeder":
            self._help_at = now + self._pace.help_s
        return min(worthwhile, key=lambda chunk: (self._copies[chunk], -self._parents_need_s(chunk, now)), default=None)

    def _worth_taking(self, helper: SourceState, now: float) -> list[ChunkId]:
        """Return a few random chunks that this source should take over: any chunk if urgent, none if it is slow."""
        rules, usual_s = self._rules, self._survey.usual_s
        ahead_s = rules.ahead_s + self._pace.lag_s
        if self.is_behind or now >= self._progress_at + ahead_s:
            return self._waiting(helper, lambda chunk: True, now)
        if helper.source.kind == "peer" and usual_s and helper.usual_s > rules.slow * usual_s:
            return []
        worth_taking_from_s = rules.ahead * helper.done_in_s(now) + ahead_s
        return self._waiting(helper, lambda chunk: self._parents_need_s(chunk, now) > worth_taking_from_s, now)

    def _waiting(self, helper: SourceState, fits: Callable[[ChunkId], bool], now: float) -> list[ChunkId]:
        """Return a few random chunks that fit, that this source can send, and that no source is about to send."""

        def free(chunk: ChunkId) -> bool:
            return (
                chunk not in helper.asked and helper.can_answer(chunk) and self._only_waits(chunk, now) and fits(chunk)
            )

        if helper.source.kind == "peer":
            return self._draw(helper, helper.extras, free)
        pool = list(self._unasked or self._missing)
        return [chunk for chunk in self._rng.sample(pool, min(len(pool), self._rules.sample)) if free(chunk)]

    def _parents_need_s(self, chunk: ChunkId, now: float) -> float:
        return min((parent.done_in_s(now) for parent in self._parents[chunk]), default=math.inf)

    def _only_waits(self, chunk: ChunkId, now: float) -> bool:
        """Return True if no answering source was asked for the chunk, and it is not reserved."""
        owed_by = self._owed_by(chunk)
        return chunk not in self._heirs and all(
            state.asked[chunk] == math.inf or self._is_mute(state, now) for state in owed_by
        )

    def _is_mute(self, state: SourceState, now: float) -> bool:
        """Return True if a source has never sent anything, for several times as long as others need for a chunk."""
        if state.delivered or state.begun or state.owing_since is None:
            return False
        usual_s = self._survey.usual_s or self._pace.hop_s
        return now >= state.owing_since + max(self._rules.first_word_s, self._rules.overdue_factor * usual_s)

    def _is_orphan(self, chunk: ChunkId, now: float) -> bool:
        """Return True if no parent of this chunk has worked since it was first asked, or since it last failed."""
        return all(parent.is_failing or self._is_mute(parent, now) for parent in self._parents[chunk])

    def _owed_by(self, chunk: ChunkId) -> list[SourceState]:
        """Return the sources with an open request for the chunk that was not cancelled."""
        asked = (self._states[name] for name in self._askers[chunk])
        return [state for state in asked if chunk not in state.taken_back]

    def _overdue(self, helper: SourceState, now: float) -> ChunkId | None:
        """Return the oldest overdue chunk of another source."""
        if helper.source.kind == "origin" and not self._needs_origin(now):
            return None
        if helper.asked and not self._unasked:
            return None  # at the end requests time out early, and a chunk that comes twice should cost only idle links
        overdue = (chunk for chunk in self._survey.overdue if chunk not in helper.asked and helper.can_answer(chunk))
        return next(overdue, None)

    def _queued_elsewhere(self, helper: SourceState, now: float) -> ChunkId | None:
        """Return, at the end, a chunk that waits behind others, from the source that owes the most."""
        sparing = helper.source.kind == "origin" or (helper.source.kind == "seeder" and now < self._help_at)
        if self._unasked or helper.asked or sparing:
            return None
        queued = []
        for state in self._states.values():
            waiting = state.asked.keys() - state.taken_back - state.begun.keys()
            if len(state.asked) > 1:
                movable = (chunk for chunk in waiting if chunk in self._missing and helper.can_answer(chunk))
                queued += [(len(waiting), chunk) for chunk in movable]
        return max(queued)[1] if queued else None

    def _needs_origin(self, now: float) -> bool:
        return needs_origin(self._states.values(), now - self._progress_at, self._rules, self._pace)

    def _draw(self, state: SourceState, offers: list[ChunkId], fits: Callable[[ChunkId], bool]) -> list[ChunkId]:
        return sample_fitting(offers, state.has, fits, most=self._rules.sample, rng=self._rng)

    def _skip_silent(self, state: SourceState, now: float) -> None:
        """Take back the chunks of a silent source, and open them to others that can send them."""
        self._drop_reservations(state)
        others = [other for other in self._states.values() if other.is_able(now) and not other.is_silent]
        others = [other for other in others if other.source.kind != "origin"]
        for chunk in [chunk for chunk in state.asked if chunk in self._missing and chunk not in state.taken_back]:
            if any(other.can_answer(chunk) for other in others):
                self._take_back(state.source.name, chunk)
                state.taken_back.add(chunk)
                if chunk not in self._heirs and not self._owed_by(chunk):
                    self._unasked[chunk] = None
        for other in others:
            other.look_again_at = -math.inf

    def _write_off(self, state: SourceState) -> None:
        """Reopen the chunks that a lost source owes, and those reserved for it."""
        self._drop_reservations(state)
        self._forget_holdings(state, state.has.copy())
        for chunk in state.forget():
            self._reopen(chunk, state.source.name)

    def _drop_reservations(self, state: SourceState) -> None:
        """Reopen the chunks that are reserved for a source."""
        for chunk in list(state.reserved):
            self._unreserve(chunk)
            self._reopen(chunk, state.source.name)

    def _forget_holdings(self, state: SourceState, chunks: Iterable[ChunkId]) -> None:
        """Record that a source no longer holds `chunks`; it may receive those of its part again."""
        self._copies.subtract(chunks)
        state.has.difference_update(chunks)
        state.planned.update(dict.fromkeys(chunk for chunk in chunks if state in self._parents[chunk]))

    def _reopen(self, chunk: ChunkId, name: str) -> None:
        """Remove a request; without any other request the chunk is open to all sources."""
        if chunk in self._missing:
            self._askers[chunk].pop(name, None)
            if chunk not in self._heirs and not self._owed_by(chunk):
                self._unasked[chunk] = None
