"""The sampling loop over any decoder: continuous batching over slots that are refilled at once.

- A step admits waiting groups, and draws a token for every running sample. A group whose last sample has ended is
  returned at once; the slots of ended samples go to the next group while the others continue.
- A prompt is computed once for all samples of its group.
- The drawn token depends on (seed, sample, position) alone, see `protocol.work.sampling`. So a sample may be restarted
  at any time with the same result, and a sample that another node began is continued after its prefix.
- A turn of an episode is such a continuation, after the earlier turns and what the environment answered; it ends after
  `turn_tokens_max` tokens at the latest. The row of a turn is kept for the next one, see `turn_cache`.
- If a request asks for it, a running group reports its new tokens at intervals.
- Out of memory: all running samples are queued again, and restarted without the kept rows, or if there were none with
  half as many slots. A sample that does not fit alone fails with its own error.
- Log-probabilities are those at the version's temperature, also of tokens that were drawn at a request's own.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from protocol.errors import EngineFailed
from protocol.work.fragment import Finish
from protocol.work.rollout import end_tokens, pack_logprobs, pack_tokens
from protocol.work.sampling import uniform_table
from swarm_node.engine import canary
from swarm_node.engine.decoder import Decoder, Logits, SavedRow
from swarm_node.engine.groups import RunningGroup, RunningSample, failed, open_group, prompts_of, since
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, Loaded, SampleRequest, SamplingStats
from swarm_node.engine.policy_files import PolicyFiles, files_of, read_config, read_generation_config, require_layers
from swarm_node.engine.turn_cache import SIZE_MAX_BYTES, TurnCache

PREFILL_TOKENS_MAX = 8192
"""Prompt tokens computed at once, padding included: their temporary memory stays far below the weights' size."""

log = logging.getLogger(__name__)


Answered = GroupGrown | GroupDone | GroupFailed


PASSED_MAX = 64
"""Policies whose canary need not be repeated: more than the rounds of one node."""


class Engine(ABC):
    """Engine that holds one policy and samples from it."""

    compares_swaps = False
    """True if a swap compares each tensor that it may have changed with the files, bit for bit."""

    def __init__(self, slots: int, *, turns_max_bytes: int = SIZE_MAX_BYTES) -> None:
        self._slots = slots
        self._turns = TurnCache(turns_max_bytes)
        self._resuming = False
        """True while kept rows are copied back, which takes memory that a new start does not."""
        self._decoder: Decoder | None = None
        self._config: dict[str, Any] = {}
        self._ends: frozenset[int] = frozenset()
        self._version: int | None = None
        self._queue: deque[RunningGroup] = deque()
        self._running: list[RunningSample] = []
        """Sample r has row r of the decoder."""
        self._answers: list[Answered] = []
        self._decode_skipped = False
        """True if the last step returned answers before drawing the next tokens of running samples."""
        self._spent = _nothing_spent()
        self._passed: deque[PolicyFiles] = deque(maxlen=PASSED_MAX)
        """Files that passed their canary in the model, as it was built."""
        self._is_proven = False
        """True if the model, as it was built, reproduced a canary that is long enough (`canary.check`)."""

    @property
    def busy(self) -> bool:
        """True if there is something to sample."""
        return bool(self._queue or self._running)

    def load(self, folder: Path, version: int) -> Loaded:
        """Load a policy folder's weights, into the existing model if the configuration is the same."""
        if self.busy:
            raise EngineFailed("A version cannot be swapped while its samples are drawn.")
        started = time.monotonic()
        self._turns.clear()
        # Unset until the load has succeeded: nothing is ever sampled from half of a version.
        decoder, self._decoder = self._decoder, None
        try:
            config = read_config(folder)
            require_layers(folder, config)
            ends = end_tokens(config, read_generation_config(folder))
            rebuilt = decoder is None or config != self._config or not decoder.swap(folder)
            if decoder is None or rebuilt:
                decoder = None  # before the next is built: two may not fit
                decoder = self._build(folder, config)
            self._check_canary(folder, decoder, rebuilt=rebuilt)
        except EngineFailed:
            raise
        except Exception as error:  # garbage in a folder may cause any error
            raise EngineFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error
        self._decoder, self._config, self._ends, self._version = decoder, config, ends, version
        return Loaded(
            parameters=decoder.parameters,
            numerics=decoder.numerics,
            rebuilt=rebuilt,
            seconds=time.monotonic() - started,
            continues=True,
        )

    def add(self, request: SampleRequest) -> None:
        """Queue a request, or raise an error if the policy cannot serve it."""
        decoder = self._loaded()
        self._turns.shrink()
        self._queue.append(open_group(request, decoder, self._version))

    def step(self) -> list[Answered]:
        """Admit groups, and draw a token for every running sample; return the answers of this step.

        If there are answers after the first tokens of new groups, they are returned before the next tokens are drawn,
        but never in two steps in a row: short groups that follow each other must not stop those that run.
        """
        try:
            self._resume()
            if self._enter():
                self._report_tokens()
            self._decode_skipped = bool(self._answers) and not self._decode_skipped
            if not self._decode_skipped:
                self._decode()
                self._report_tokens()
        except (RuntimeError, MemoryError) as error:
            if not self.is_out_of_memory(error):
                raise
            self._start_over()
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, request_ids: Collection[str]) -> list[str]:
        """Cancel the known requests among `request_ids`; return their ids."""
        known = dict.fromkeys([*(sample.group for sample in self._running), *self._queue])
        gone = [group for group in known if group.request.request_id in request_ids]
        self._remove(gone)
        return [group.request.request_id for group in gone]

    def generate(self, requests: Sequence[SampleRequest], on_group: Callable[[GroupDone], None]) -> None:
        """Sample every request; call `on_group` for each group when it ends."""
        for request in requests:
            self.add(request)
        while self.busy:
            for group in self.step():
                if isinstance(group, GroupFailed):
                    self.cancel([request.request_id for request in requests])
                    raise EngineFailed(group.message, hint=group.hint)
                if isinstance(group, GroupDone):
                    on_group(group)

    def measured(self) -> SamplingStats:
        """Return the sampling statistics since the last call."""
        self._turns.shrink()
        spent, self._spent = self._spent, _nothing_spent()
        return SamplingStats(**spent)

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return True if the error is a failed allocation."""
        return isinstance(error, MemoryError)

    @abstractmethod
    def _build(self, folder: Path, config: dict[str, Any]) -> Decoder:
        """Return a decoder with the weights of this folder."""

    def _check_canary(self, folder: Path, decoder: Decoder, *, rebuilt: bool) -> None:
        """Check the canary, unless these files passed it in this model, and swaps since compared what they changed."""
        files = files_of(folder)
        if rebuilt or not self.compares_swaps:
            self._passed.clear()
            self._is_proven = False
        if files not in self._passed:
            self._is_proven |= canary.check(
                folder,
                partial(canary.score, decoder),
                vocab_size=decoder.vocab_size,
                numerics=decoder.numerics,
                is_proven=self._is_proven,
            )
            self._passed.append(files)

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise EngineFailed("No policy is loaded.", hint="Load a policy before generating.")
        return self._decoder

    def _enter(self) -> bool:
        """Admit as many waiting groups as fit, and draw their samples' first tokens; return True if there were any."""
        entering = self._next_groups()
        if not entering:
            return False
        started = time.monotonic()
        first = self._join([(group, number) for group, numbers in entering for number in numbers])
        prompts, copies = prompts_of(entering)
        self._draw(self._loaded().prefill(prompts, copies), first)
        self._count_first(sum(map(len, prompts)), sum(copies), started)
        return True

    def _resume(self) -> None:
        """Admit the waiting samples whose rows were kept since the turn before, and draw their next tokens."""
        resumed = self._next_turns()
        if not resumed:
            return
        started = time.monotonic()
        first = self._join([(group, number) for group, number, _ in resumed])
        rows = [row for _, _, row in resumed]
        texts = [[*group.prompt, *group.prefixes[number]] for group, number, _ in resumed]
        self._resuming = True
        logits = self._loaded().resume(rows, texts)
        self._resuming = False
        self._draw(logits, first)
        new = sum(len(text) - row.length for text, row in zip(texts, rows, strict=True))
        self._count_first(new, len(rows), started)

    def _join(self, samples: Sequence[tuple[RunningGroup, int]]) -> int:
        """Append samples to the running ones, before anything may run out of memory; return the row of the first."""
        first = len(self._running)
        self._running += [RunningSample(*sample) for sample in samples]
        for sample in self._running[first:]:
            sample.tokens = list(sample.group.prefixes[sample.number])
            sample.length_max = sample.group.request.length_max(len(sample.tokens))
        longest = max(sample.length_max for sample in self._running[first:])
        seeds, numbers = [group.request.seed for group, _ in samples], [number for _, number in samples]
        for sample, row in zip(self._running[first:], uniform_table(seeds, numbers, longest), strict=True):
            sample.uniforms = row
        return first

    def _count_first(self, prompt_tokens: int, first_tokens: int, started: float) -> None:
        self._spent["prompt_tokens"] += prompt_tokens
        self._spent["first_tokens"] += first_tokens
        self._spent["prefill_s"] += time.monotonic() - started

    def _next_turns(self) -> list[tuple[RunningGroup, int, SavedRow]]:
        """Remove the samples to resume now from the queue; return them with their rows."""
        resumed: list[tuple[RunningGroup, int, SavedRow]] = []
        longest = 0
        if not self._turns:
            return []
        for group in self._queue:
            for number in list(group.waiting) if group.request.turn_tokens_max else ():
                if len(self._running) + len(resumed) >= self._slots or longest * len(resumed) >= PREFILL_TOKENS_MAX:
                    break
                text = [*group.prompt, *group.prefixes[number]]
                if (row := self._turns.take(group.request.seed, number, text)) is not None:
                    resumed.append((group, number, row))
                    group.waiting.remove(number)
                    longest = max(longest, len(text) - row.length)
        self._queue = deque(group for group in self._queue if group.waiting)
        return resumed

    def _next_groups(self) -> list[tuple[RunningGroup, list[int]]]:
        """Remove the groups to admit now from the queue; return them with their samples."""
        taken: list[tuple[RunningGroup, list[int]]] = []
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
            self._draw(decoder.decode([sample.tokens[-1] for sample in self._running]), 0)
            self._spent["decode_s"] += time.monotonic() - started

    def _draw(self, logits: Logits, first: int) -> None:
        """Draw the next token of every sample from `first` on, and remove the samples that end with it."""
        drawn = self._running[first:]
        temperatures = [sample.group.request.temperature for sample in drawn]
        own = [sample.group.request.own_temperature for sample in drawn]
        uniforms = [float(sample.uniforms[len(sample.tokens)]) for sample in drawn]
        tokens, logprobs = logits.draw(temperatures, uniforms, own)
        now, leaving, broken = time.monotonic(), [], dict[RunningGroup, None]()
        for row, (sample, token, logprob) in enumerate(zip(drawn, tokens, logprobs, strict=True), first):
            group = sample.group
            group.first_token_at = group.first_token_at or now
            if math.isnan(logprob):
                broken[group] = None
            elif sample.grow(token, logprob, self._ends):
                leaving.append(row)
                self._keep(sample, row)
                self._end(sample, now)
        nan = EngineFailed("The policy returns NaN probabilities.")
        self._answers += [failed(group, nan) for group in broken]
        self._remove(broken, leaving)

    def _keep(self, sample: RunningSample, row: int) -> None:
        """Keep the row of a finished turn if its episode may go on; without memory for it, drop all kept rows."""
        request = sample.group.request
        if not request.turn_tokens_max or len(sample.tokens) >= request.max_new_tokens:
            return
        try:
            saved = self._loaded().save(row)
        except (RuntimeError, MemoryError) as error:
            if not self.is_out_of_memory(error):
                raise
            self._turns.clear()
            return
        if saved is not None:  # the last token was drawn, and not computed yet
            self._turns.put(request.seed, sample.number, [*sample.group.prompt, *sample.tokens[:-1]], saved)

    def _end(self, sample: RunningSample, now: float) -> None:
        """Keep a finished sample, and answer with its group if it was the last."""
        group = sample.group
        group.ended[sample.number] = sample.whole(self._ends)
        if len(group.ended) == group.request.samples:
            samples = tuple(group.ended[number] for number in range(group.request.samples))
            ago_s = now - (group.first_token_at or now)
            self._answers.append(
                GroupDone(request_id=group.request.request_id, samples=samples, first_token_ago_s=ago_s)
            )

    def _report_tokens(self) -> None:
        """Report the new tokens of each group that is due."""
        now = time.monotonic()
        for group in dict.fromkeys(sample.group for sample in self._running):
            if not group.request.is_report_due(now, first_token_at=group.first_token_at, reported_at=group.reported_at):
                continue
            samples = [sample for sample in self._running if sample.group is group]
            group.reported_at = now
            grown: dict[int, tuple[bytes, bytes, Finish]] = {
                sample.number: (pack_tokens(sample.new_tokens), pack_logprobs(sample.logprobs), "")
                for sample in samples
            }
            grown |= {number: (done.tokens, done.logprobs, done.finish) for number, done in group.ended.items()}
            parts = since(group.told, grown)
            if parts:
                self._answers.append(GroupGrown(request_id=group.request.request_id, parts=parts))

    def _remove(self, groups: Collection[RunningGroup], rows: Collection[int] = ()) -> None:
        """Remove groups, queued or running, and the samples in `rows`."""
        leaving = set(rows)
        if groups:
            self._queue = deque(group for group in self._queue if group not in groups)
            leaving.update(row for row, sample in enumerate(self._running) if sample.group in groups)
        self._vacate(leaving)

    def _vacate(self, gone: set[int]) -> None:
        """Remove samples; the last samples move into the free slots."""
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
        """Queue all running groups again after running out of memory; drop the kept rows, or else use fewer slots."""
        running, self._running = self._running, []
        self._loaded().clear()
        back = [group for group in dict.fromkeys(sample.group for sample in running) if group not in self._queue]
        self._queue.extendleft(reversed(back))
        for group in self._queue:
            group.waiting = [number for number in range(group.request.samples) if number not in group.ended]
        had_rows, self._resuming = self._turns.clear() or self._resuming, False
        if had_rows:
            log.warning("out of memory with rows of finished turns; they are dropped")
        elif len(running) > 1:
            self._slots = len(running) // 2
            log.warning("out of memory with %d samples at once; from now on %d", len(running), self._slots)
        else:
            hint = "Free memory, or use another machine for this model."
            self._answers.append(
                failed(self._queue.popleft(), EngineFailed("Not enough memory for one sample.", hint=hint))
            )


def _nothing_spent() -> dict[str, Any]:
    return {"prompt_tokens": 0, "first_tokens": 0, "prefill_s": 0.0, "later_tokens": 0, "decode_s": 0.0}
