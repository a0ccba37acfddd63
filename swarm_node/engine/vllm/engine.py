"""The engine on vLLM, which does its own batching; implements `session.AnyEngine`.

- Each sample is its own request to vLLM, since each draws by its own number. A group is returned when its last sample
  has ended.
- A sample that another node began, or a turn of an episode, is a request whose prompt ends with the prefix; it draws
  from the next position.
- A swap copies the new weights into the existing model; another configuration restarts vLLM. So does every version of a
  mixture of experts, whose weights vLLM's kernels permute after they are loaded.
- Out of memory: vLLM is rebuilt for half as many samples at once, and running samples are restarted; their tokens
  depend only on the seed. A sample that does not fit alone fails with its own error.
- After any other failure in a step the state of vLLM is unknown: the process exits, and the agent starts another.
- Log-probabilities are those at the version's temperature, also of tokens that were drawn at a request's own.
- Only groups that a caller reads report their tokens: vLLM takes longer for a sample whose tokens come one by one.
"""

import logging
import math
import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.errors import EngineFailed
from protocol.work.fragment import Finish
from protocol.work.rollout import Sample, end_tokens, pack_logprobs, pack_tokens, unpack_tokens
from swarm_node.engine import canary
from swarm_node.engine.groups import open_group, since
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, Loaded, SampleRequest, SamplingStats
from swarm_node.engine.policy_files import has_experts, read_config, read_generation_config, require_layers
from swarm_node.engine.vllm.model import ROWS_MAX, NewTokens, VllmModel
from swarm_node.engine.vllm.step_times import StepTimes

log = logging.getLogger(__name__)

Answered = GroupDone | GroupFailed | GroupGrown


@dataclass(eq=False)
class VllmSample:
    """A sample that vLLM draws."""

    prefix: list[int] = field(default_factory=list)
    """The tokens before the first draw: another node's, or the earlier turns of the episode."""
    finish: Finish = ""
    """The finish of a sample whose prefix is complete; vLLM does not draw it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    cached: int = 0
    """Tokens before the first draw that vLLM did not have to compute."""

    def whole(self, ends: Collection[int]) -> Sample:
        """Return the finished sample, without its prefix."""
        return Sample(
            tokens=pack_tokens(self.tokens),
            logprobs=pack_logprobs(self.logprobs),
            finish=self.finish or ("stop" if self.tokens[-1] in ends else "length"),
        )

    def so_far(self, ends: Collection[int]) -> tuple[bytes, bytes, Finish]:
        """Return its drawn tokens, their log-probabilities, and its finish if it has ended."""
        finish: Finish = self.whole(ends).finish if self.finished else ""
        return pack_tokens(self.tokens), pack_logprobs(self.logprobs), finish


@dataclass(eq=False)
class VllmGroup:
    """A request that is being sampled."""

    request: SampleRequest
    prompt: list[int]
    samples: list[VllmSample] = field(default_factory=list)
    first_token_at: float | None = None
    reported_at: float | None = None
    told: dict[int, int] = field(default_factory=dict)
    """Number of tokens reported, by sample."""

    def is_due(self, now: float) -> bool:
        """Return True if its new tokens are to be reported."""
        is_due = self.request.is_report_due(now, first_token_at=self.first_token_at, reported_at=self.reported_at)
        return self.request.is_read and not self.complete and is_due

    @property
    def complete(self) -> bool:
        return all(sample.finished for sample in self.samples)

    @property
    def unfinished_samples(self) -> list[VllmSample]:
        """The samples for which vLLM draws tokens."""
        return [sample for sample in self.samples if not sample.finish]

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens before the first draw, over all samples."""
        return sum(len(self.prompt) + len(sample.prefix) for sample in self.unfinished_samples)

    @property
    def computed_tokens(self) -> int:
        """Number of these tokens that vLLM computed; the others came from its prefix cache."""
        return self.prefill_tokens - sum(sample.cached for sample in self.unfinished_samples)

    @property
    def prompt_tokens(self) -> int:
        """Number of computed tokens, with a prompt without prefixes counted once for all samples."""
        if self.request.prefixes:
            return self.computed_tokens
        return len(self.prompt) - min(sample.cached for sample in self.samples)


class VllmEngine:
    """Engine that holds one policy and samples from it."""

    def __init__(self, *, dtype: str = "auto", vram_share: float = 1.0, cards: int = 1) -> None:
        self._vram_share, self._cards = vram_share, cards
        self._dtype, self._rows = dtype, ROWS_MAX
        self._model: VllmModel | None = None
        self._config: dict[str, Any] = {}
        self._ends: set[int] = set()
        self._folder, self._version = Path(), -1
        self._groups: dict[str, VllmGroup] = {}
        self._samples: dict[str, tuple[VllmGroup, VllmSample]] = {}
        """Unfinished samples by vLLM's request id."""
        self._spent, self._times = _nothing_spent(), StepTimes()

    @property
    def busy(self) -> bool:
        """True if there is something to sample."""
        return bool(self._groups)

    def load(self, folder: Path, version: int) -> Loaded:
        """Load a policy folder's weights, into the existing model if the configuration is the same."""
        if self.busy:
            raise EngineFailed("A version cannot be swapped while its samples are drawn.")
        started = time.monotonic()
        # Unset until the load has succeeded: nothing is ever sampled from half of a version.
        model, self._model = self._model, None
        try:
            config = read_config(folder)
            require_layers(folder, config)
            ends = end_tokens(config, read_generation_config(folder))
            rebuilt = model is None or config != self._config or has_experts(config) or not model.swap(folder)
            if model is None or rebuilt:
                if model is not None:
                    model.close()  # before the next is built: two may not fit
                model = self._build(folder)
            canary.check(folder, model.score, vocab_size=model.vocab_size, numerics=model.numerics)
        except Exception as error:  # garbage in a folder may cause any error
            if model is not None:
                model.close()
            if isinstance(error, EngineFailed):
                raise
            raise EngineFailed(f"The policy in {folder} cannot be loaded: {error!r}"[:1000]) from error
        self._model, self._config, self._folder, self._version = model, config, folder, version
        self._ends = {end for end in ends if end < model.vocab_size}  # vLLM refuses an end token that cannot be drawn
        seconds = time.monotonic() - started
        return Loaded(
            parameters=model.parameters, numerics=model.numerics, rebuilt=rebuilt, seconds=seconds, continues=True
        )

    def add(self, request: SampleRequest) -> None:
        """Queue a request, or raise an error if the policy cannot serve it."""
        prompt = open_group(request, self._loaded(), self._version).prompt  # for its checks
        group = VllmGroup(request, prompt)
        self._groups[request.request_id] = group
        self._begin(group)

    def step(self) -> list[Answered]:
        """Admit samples, and draw a token for every running sample; return the groups that ended."""
        started, begun = time.monotonic(), self._begun()
        try:
            drawn = self._step()
            if drawn is None:
                return self._start_over()
        except Exception:  # any error is possible, and the state of vLLM and its device is unknown
            log.exception("vLLM failed in a step")
            os._exit(1)
        now = time.monotonic()
        for new_tokens in drawn:
            self._note(new_tokens, now)
        decoded = sum(not sample.finished for group in begun for sample in group.samples)
        new = [group for group in self._begun() if group not in begun]
        self._times.record(now - started, decoded=decoded, begun=new)
        self._times.settle()
        grown = [self._grown(group, now) for group in self._groups.values() if group.is_due(now)]
        return [*grown, *(self._end(group) for group in list(self._groups.values()) if group.complete)]

    def cancel(self, request_ids: Collection[str]) -> list[str]:
        """Cancel the known requests among `request_ids`; return their ids."""
        gone = [self._groups.pop(name) for name in list(self._groups) if name in request_ids]
        self._times.leave_out(gone)
        for group in gone:
            self._abort(group)
        return [group.request.request_id for group in gone]

    def measured(self) -> SamplingStats:
        """Return the sampling statistics since the last call."""
        spent, self._spent = self._spent, _nothing_spent()
        prefill_s, decode_s = self._times.take()
        return SamplingStats.model_validate({"prefill_s": prefill_s, "decode_s": decode_s, **spent})

    def _build(self, folder: Path) -> VllmModel:
        return VllmModel(folder, self._dtype, rows=self._rows, vram_share=self._vram_share, cards=self._cards)

    def _loaded(self) -> VllmModel:
        if self._model is None:
            raise EngineFailed("No policy is loaded.", hint="Load a policy before generating.")
        return self._model

    def _step(self) -> list[NewTokens] | None:
        """Return the drawn tokens; None if out of memory. The memory of the failed step is free again by then."""
        try:
            return self._loaded().step()
        except Exception as error:  # several error types mean out of memory
            if not _out_of_memory(error):
                raise
            return None

    def _begin(self, group: VllmGroup) -> None:
        """Pass all samples of a group to vLLM; the first one streams, which gives the time of the first token.

        The others stream if a caller reads them.
        """
        model = self._loaded()
        group.samples = _samples(group.request)
        for number, sample in enumerate(group.samples):
            if sample.finished:
                continue
            stream = group.request.is_read or sample is group.unfinished_samples[0]
            name = model.add(group.request, number, group.prompt, sample.prefix, self._ends, stream=stream)
            self._samples[name] = group, sample

    def _note(self, drawn: NewTokens, now: float) -> None:
        """Record new tokens of a sample."""
        group, sample = self._samples[drawn.sample_id]
        group.first_token_at = group.first_token_at or now
        sample.tokens += drawn.tokens
        sample.logprobs += drawn.logprobs
        sample.cached = drawn.cached
        if drawn.finished:
            sample.finished = True
            del self._samples[drawn.sample_id]

    def _grown(self, group: VllmGroup, now: float) -> GroupGrown:
        """Return the new tokens of a running group."""
        group.reported_at = now
        grown = {number: sample.so_far(self._ends) for number, sample in enumerate(group.samples) if not sample.finish}
        return GroupGrown(request_id=group.request.request_id, parts=since(group.told, grown))

    def _end(self, group: VllmGroup) -> Answered:
        """Return the answer for a group whose samples have ended."""
        request = group.request
        del self._groups[request.request_id]
        if not all(math.isfinite(logprob) for sample in group.samples for logprob in sample.logprobs):
            self._config = {}  # vLLM's cache now contains NaN, which would affect the next version even when masked
            return _failed(group, "The policy returns NaN probabilities.")
        self._spent["prompt_tokens"] += group.prompt_tokens
        self._spent["first_tokens"] += len(group.unfinished_samples)
        self._spent["later_tokens"] += sum(len(sample.tokens) - 1 for sample in group.unfinished_samples)
        samples = tuple(sample.whole(self._ends) for sample in group.samples)
        ago_s = time.monotonic() - (group.first_token_at or time.monotonic())
        return GroupDone(request_id=request.request_id, samples=samples, first_token_ago_s=ago_s)

    def _begun(self) -> list[VllmGroup]:
        return [group for group in self._groups.values() if group.first_token_at is not None]

    def _abort(self, group: VllmGroup) -> None:
        names = [name for name, (owner, _) in self._samples.items() if owner is group]
        if self._model is not None:
            self._model.abort(names)
        for name in names:
            del self._samples[name]

    def _start_over(self) -> list[Answered]:
        """Restart all groups after running out of memory, with fewer samples at once."""
        answers: list[Answered] = []
        at_once = min(self._rows, len(self._samples))
        if at_once == 1:
            hint = "Free memory, or use another machine for this model."
            first = self._groups.pop(next(iter(self._groups)))
            answers = [_failed(first, "Not enough memory for one sample.", hint)]
        self._rows = max(1, at_once // 2)
        log.warning("out of memory; from now on %d samples at once", self._rows)
        self._samples.clear()
        self._times.leave_out([*self._groups.values()])
        self._loaded().close()
        self._model = self._build(self._folder)
        for group in self._groups.values():
            group.first_token_at = None
            self._begin(group)
        return answers


def _samples(request: SampleRequest) -> list[VllmSample]:
    """Return a request's samples before vLLM draws anything."""
    if not request.prefixes:
        return [VllmSample() for _ in range(request.samples)]
    return [
        VllmSample(prefix=unpack_tokens(prefix.tokens).tolist(), finish=prefix.finish, finished=bool(prefix.finish))
        for prefix in request.prefixes
    ]


def _failed(group: VllmGroup, message: str, hint: str = "") -> GroupFailed:
    return GroupFailed.from_error(group.request.request_id, EngineFailed(message, hint=hint))


def _nothing_spent() -> dict[str, Any]:
    return {"prompt_tokens": 0, "first_tokens": 0, "later_tokens": 0}


def _out_of_memory(error: Exception) -> bool:
    """Return True for a failed allocation; on the CPU torch has no error type for it, and a worker reports a text."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(text in str(error) for text in ("allocate memory", "bad_alloc", "out of memory"))
