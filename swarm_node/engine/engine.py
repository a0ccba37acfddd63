"""Samples groups from any decoder: continuous batching over slots that are refilled at once.

- A step lets waiting groups in, and draws a token for every sample that runs. A group whose last sample has ended is
  handed out at once; the slots of samples that ended go to the next group while the others run on.
- A prompt is computed once for all samples of its group.
- Which token is drawn depends on (seed, sample, position) alone, see `protocol.sampling`. So a sample may be started
  over at any time, and comes out the same; and one that somebody else began is gone on with, after its prefix.
- Where a request asks for it, a group that runs says now and then what it has grown by.
- Out of memory: everything that runs is put back, and started over with half as many slots. What does not fit even
  alone fails by name.
- Log-probabilities are those of the distribution drawn from, that is at the request's temperature.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineFailed
from protocol.fragment import Finish, Part
from protocol.rollout import Sample, end_tokens, pack_logprobs, pack_tokens, unpack_tokens
from protocol.sampling import uniform_table
from swarm_node.engine import canary
from swarm_node.engine.decoder import Decoder, Logits
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, Loaded, Measured, Request
from swarm_node.engine.policy_files import read_config, read_generation_config

PREFILL_TOKENS_MAX = 8192
"""Prompt tokens computed at once, padding included: what they need in between stays far below the weights' size."""

log = logging.getLogger(__name__)


Answered = GroupGrown | GroupDone | GroupFailed


@dataclass(eq=False)
class Group:
    """A request on its way."""

    request: Request
    prompt: list[int]
    waiting: list[int]
    """Samples that have no slot yet."""
    prefixes: list[list[int]]
    """The tokens with which each sample begins."""
    ended: dict[int, Sample] = field(default_factory=dict)
    first_token_at: float | None = None
    told_at: float | None = None
    told: dict[int, int] = field(default_factory=dict)
    """How many tokens of each sample were told of."""

    @property
    def longest(self) -> int:
        """The most tokens that are computed before a sample's first draw."""
        return len(self.prompt) + max(map(len, self.prefixes))


@dataclass(eq=False)
class Running:
    """A sample in its slot."""

    group: Group
    number: int
    uniforms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    tokens: list[int] = field(default_factory=list)
    """With the prefix, of which there are no log-probabilities."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - len(self.logprobs) :]


class Engine(ABC):
    """Holds one policy and samples from it."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._decoder: Decoder | None = None
        self._config: dict[str, Any] = {}
        self._ends: frozenset[int] = frozenset()
        self._version: int | None = None
        self._queue: deque[Group] = deque()
        self._running: list[Running] = []
        """Sample r has row r of the decoder."""
        self._answers: list[Answered] = []
        self._spent = _nothing_spent()

    @property
    def busy(self) -> bool:
        """Whether there is something to sample."""
        return bool(self._queue or self._running)

    def load(self, folder: Path, version: int) -> Loaded:
        """Take a policy folder's weights, into the model that is there if the configuration is the same."""
        if self.busy:
            raise EngineFailed("A version cannot be swapped while its samples are drawn.")
        started = time.monotonic()
        # Gone until everything has worked: nothing is ever sampled from half of a version.
        decoder, self._decoder = self._decoder, None
        try:
            config = read_config(folder)
            ends = end_tokens(config, read_generation_config(folder))
            rebuilt = decoder is None or config != self._config or not decoder.swap(folder)
            if decoder is None or rebuilt:
                decoder = None  # before the next is made: two may not fit
                decoder = self._build(folder, config)
            canary.check(
                folder,
                partial(canary.score, decoder),
                vocab_size=decoder.vocab_size,
                tolerance_nats=decoder.canary_tolerance_nats,
            )
        except EngineFailed:
            raise
        except Exception as error:  # nobody can list what garbage in a folder does to those who read it
            raise EngineFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error
        self._decoder, self._config, self._ends, self._version = decoder, config, ends, version
        seconds = time.monotonic() - started
        return Loaded(
            parameters=decoder.parameters, numerics=decoder.numerics, rebuilt=rebuilt, seconds=seconds, continues=True
        )

    def add(self, request: Request) -> None:
        """Queue a request, if the policy can do what it asks for."""
        decoder, prompt = self._loaded(), unpack_tokens(request.prompt).tolist()
        if request.version != self._version:
            raise EngineFailed(f"A request for version {request.version}, while version {self._version} is loaded.")
        if max(prompt) >= decoder.vocab_size:
            raise EngineFailed(f"The prompt has token {max(prompt)}, the vocabulary only {decoder.vocab_size}.")
        if len(prompt) + request.max_new_tokens > decoder.positions_max:
            raise EngineFailed(
                f"A prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones pass the model's "
                f"{decoder.positions_max} positions."
            )
        group = _group(request, prompt)
        if request.prefixes:
            _check_prefixes(group, decoder.vocab_size)
        self._queue.append(group)

    def step(self) -> list[Answered]:
        """Let groups in, and draw a token for every running sample; the groups that this ended."""
        try:
            self._enter()
            self._decode()
            self._tell()
        except (RuntimeError, MemoryError) as error:
            if not self.is_out_of_memory(error):
                raise
            self._start_over()
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, request_ids: Collection[str]) -> list[str]:
        """Forget those of these requests that are here; which they were."""
        known = dict.fromkeys([*(one.group for one in self._running), *self._queue])
        gone = [group for group in known if group.request.request_id in request_ids]
        self._remove(gone)
        return [group.request.request_id for group in gone]

    def generate(self, requests: Sequence[Request], on_group: Callable[[GroupDone], None]) -> None:
        """Sample every request; each group is handed over as it ends."""
        for request in requests:
            self.add(request)
        while self.busy:
            for group in self.step():
                if isinstance(group, GroupFailed):
                    self.cancel([request.request_id for request in requests])
                    raise EngineFailed(group.message, hint=group.hint)
                if isinstance(group, GroupDone):
                    on_group(group)

    def measured(self) -> Measured:
        """What was sampled since this was last asked for."""
        spent, self._spent = self._spent, _nothing_spent()
        return Measured(**spent)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an allocation failed."""
        return isinstance(error, MemoryError)

    @abstractmethod
    def _build(self, folder: Path, config: dict[str, Any]) -> Decoder:
        """A decoder with the weights of this folder."""

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise EngineFailed("No policy is loaded.", hint="Load one before generating.")
        return self._decoder

    def _enter(self) -> None:
        """Give slots to as many waiting groups as fit, and draw their samples' first tokens."""
        entering = self._next_groups()
        if not entering:
            return
        started, first = time.monotonic(), len(self._running)
        samples = [(group, number) for group, numbers in entering for number in numbers]
        longest = max(group.request.max_new_tokens for group, _ in entering)
        seeds, numbers = [group.request.seed for group, _ in samples], [number for _, number in samples]
        self._running += [Running(*sample) for sample in samples]  # before anything that memory may not suffice for
        for one, row in zip(self._running[first:], uniform_table(seeds, numbers, longest), strict=True):
            one.uniforms, one.tokens = row, list(one.group.prefixes[one.number])
        prompts, copies = _prompts(entering)
        self._draw(self._loaded().prefill(prompts, copies), first)
        self._spent["prompt_tokens"] += sum(map(len, prompts))
        self._spent["first_tokens"] += sum(copies)
        self._spent["prefill_s"] += time.monotonic() - started

    def _next_groups(self) -> list[tuple[Group, list[int]]]:
        """The groups to let in now, and which of their samples; taken off the queue."""
        taken: list[tuple[Group, list[int]]] = []
        free, longest, prompts = self._slots - len(self._running), 0, 0
        while self._queue and (self._loaded().joins_midway or not self._running):
            group = self._queue[0]
            longest = max(longest, group.longest)
            count = min(len(group.waiting), self._slots)
            if group.request.prefixes:  # as many prompts as samples
                count = min(count, max(1, PREFILL_TOKENS_MAX // longest - prompts))
            prompts += count if group.request.prefixes else 1
            if count > free or (taken and longest * prompts > PREFILL_TOKENS_MAX):
                break
            taken.append((group, group.waiting[:count]))
            free, group.waiting = free - count, group.waiting[count:]
            if not group.waiting:
                self._queue.popleft()
        return taken

    def _decode(self) -> None:
        if self._running:
            started, decoder = time.monotonic(), self._loaded()
            self._spent["later_tokens"] += len(self._running)
            self._draw(decoder.decode([one.tokens[-1] for one in self._running]), 0)
            self._spent["decode_s"] += time.monotonic() - started

    def _draw(self, logits: Logits, first: int) -> None:
        """Draw the next token of every sample from this one on, and take out those that end with it."""
        drawn = self._running[first:]
        temperatures = [one.group.request.temperature for one in drawn]
        uniforms = [float(one.uniforms[len(one.tokens)]) for one in drawn]
        tokens, logprobs = logits.draw(temperatures, uniforms)
        now, leaving, broken = time.monotonic(), [], dict[Group, None]()
        for row, (one, token, logprob) in enumerate(zip(drawn, tokens, logprobs, strict=True), first):
            group = one.group
            group.first_token_at = group.first_token_at or now
            one.tokens.append(token)
            one.logprobs.append(logprob)
            if math.isnan(logprob):
                broken[group] = None
            elif token in self._ends or len(one.tokens) == group.request.max_new_tokens:
                leaving.append(row)
                self._end(one, now)
        self._answers += [_failed(group, "The policy gives probabilities that are no numbers.") for group in broken]
        self._remove(broken, leaving)

    def _end(self, one: Running, now: float) -> None:
        """Keep a finished sample, and hand over its group if it was the last."""
        group = one.group
        group.ended[one.number] = Sample(
            tokens=pack_tokens(one.new_tokens),
            logprobs=pack_logprobs(one.logprobs),
            finish="stop" if one.tokens[-1] in self._ends else "length",
        )
        if len(group.ended) == group.request.samples:
            samples = tuple(group.ended[number] for number in range(group.request.samples))
            ago_s = now - (group.first_token_at or now)
            self._answers.append(
                GroupDone(request_id=group.request.request_id, samples=samples, first_token_ago_s=ago_s)
            )

    def _tell(self) -> None:
        """Say of each group that it is time for what it has grown by."""
        now, running = time.monotonic(), dict[Group, list[Running]]()
        for one in self._running:
            every_s = one.group.request.tell_every_s
            if every_s and now - (one.group.told_at or one.group.first_token_at or now) >= every_s:
                running.setdefault(one.group, []).append(one)
        for group, samples in running.items():
            group.told_at = now
            grown: dict[int, tuple[bytes, bytes, Finish]] = {
                one.number: (pack_tokens(one.new_tokens), pack_logprobs(one.logprobs), "") for one in samples
            }
            grown |= {number: (done.tokens, done.logprobs, done.finish) for number, done in group.ended.items()}
            parts = _since(group, grown)
            if parts:
                self._answers.append(GroupGrown(request_id=group.request.request_id, parts=parts))

    def _remove(self, groups: Collection[Group], rows: Collection[int] = ()) -> None:
        """Forget groups, wherever they are, and take out these samples besides."""
        leaving = set(rows)
        if groups:
            self._queue = deque(group for group in self._queue if group not in groups)
            leaving.update(row for row, one in enumerate(self._running) if one.group in groups)
        self._vacate(leaving)

    def _vacate(self, gone: set[int]) -> None:
        """Take samples out; the last ones move into the slots that fall free."""
        if not gone:
            return
        left = len(self._running) - len(gone)
        holes = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, len(self._running)) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self._running[hole] = self._running[mover]
        del self._running[left:]
        self._loaded().move(movers, holes, left)

    def _start_over(self) -> None:
        """Out of memory: put back what runs, for fewer slots."""
        running, self._running = self._running, []
        self._loaded().clear()
        back = [group for group in dict.fromkeys(one.group for one in running) if group not in self._queue]
        self._queue.extendleft(reversed(back))
        for group in self._queue:
            group.waiting = [number for number in range(group.request.samples) if number not in group.ended]
        if len(running) > 1:
            self._slots = len(running) // 2
            log.warning("out of memory with %d samples at once; from now on %d", len(running), self._slots)
        else:
            hint = "Free some, or let another machine sample this policy."
            self._answers.append(_failed(self._queue.popleft(), "There is not enough memory for one sample.", hint))


def _group(request: Request, prompt: list[int]) -> Group:
    """A request with its prefixes opened; a sample whose prefix is complete has ended."""
    if not request.prefixes:
        return Group(request, prompt, list(range(request.samples)), [[]] * request.samples)
    prefixes = [unpack_tokens(prefix.tokens).tolist() for prefix in request.prefixes]
    group = Group(request, prompt, [], prefixes)
    for number, prefix in enumerate(request.prefixes):
        if prefix.finish:
            group.ended[number] = Sample(tokens=b"", logprobs=b"", finish=prefix.finish)
        else:
            group.waiting.append(number)
    return group


def _check_prefixes(group: Group, vocab_size: int) -> None:
    """Whether there is a prefix for each sample, of known tokens, and at least one sample to go on with."""
    request = group.request
    waiting = [group.prefixes[number] for number in group.waiting]
    if len(request.prefixes) != request.samples or not waiting:
        raise EngineFailed("The prefixes are not one for each sample, or leave nothing to sample.")
    if any(len(prefix) >= request.max_new_tokens or max(prefix, default=0) >= vocab_size for prefix in waiting):
        raise EngineFailed("A prefix has tokens beyond the vocabulary, or as many as a sample may have.")


def _prompts(entering: Sequence[tuple[Group, list[int]]]) -> tuple[list[list[int]], list[int]]:
    """What to compute before the first draw, and for how many samples each: a prompt, or a prompt and one's prefix."""
    prompts, copies = [], []
    for group, numbers in entering:
        own = [[*group.prompt, *group.prefixes[number]] for number in numbers] if group.request.prefixes else []
        prompts += own or [group.prompt]
        copies += [1] * len(own) or [len(numbers)]
    return prompts, copies


def _since(group: Group, grown: Mapping[int, tuple[bytes, bytes, Finish]]) -> tuple[Part, ...]:
    """What was not told of yet; it is told now."""
    parts = []
    for number, (tokens, logprobs, finish) in sorted(grown.items()):
        start = group.told.get(number, 0)
        if len(tokens) > 4 * start:
            new = {"tokens": tokens[4 * start :], "logprobs": logprobs[4 * start :]}
            parts.append(Part(sample=number, start=start, finish=finish, **new))
            group.told[number] = len(tokens) // 4
    return tuple(parts)


def _failed(group: Group, message: str, hint: str = "") -> GroupFailed:
    return GroupFailed.of(group.request.request_id, EngineFailed(message, hint=hint))


def _nothing_spent() -> dict[str, Any]:
    return {"prompt_tokens": 0, "first_tokens": 0, "prefill_s": 0.0, "later_tokens": 0, "decode_s": 0.0}
