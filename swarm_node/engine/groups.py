"""Groups in the sampling loop: the request, the running samples, and the ended samples.

- Records state only: `engine` decides about slots, and when a token is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineFailed, SwarmError
from protocol.work.fragment import Finish, FragmentPart
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupFailed, SampleRequest


@dataclass(eq=False)
class RunningGroup:
    """A request that is being sampled."""

    request: SampleRequest
    prompt: list[int]
    waiting: list[int]
    """Samples that have no slot yet."""
    prefixes: list[list[int]]
    """The first tokens of each sample: drawn by another node, or the earlier turns of its episode."""
    ended: dict[int, Sample] = field(default_factory=dict)
    first_token_at: float | None = None
    reported_at: float | None = None
    told: dict[int, int] = field(default_factory=dict)
    """Number of tokens reported, by sample."""

    @property
    def longest(self) -> int:
        """Largest number of tokens that are computed before a sample's first draw."""
        return len(self.prompt) + max(map(len, self.prefixes))


@dataclass(eq=False)
class RunningSample:
    """A sample in its slot."""

    group: RunningGroup
    number: int
    uniforms: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    tokens: list[int] = field(default_factory=list)
    """All tokens, including the prefix, which has no log-probabilities."""
    logprobs: list[float] = field(default_factory=list)
    length_max: int = 0
    """The length at which the sample stops by `length`."""

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - len(self.logprobs) :]

    def grow(self, token: int, logprob: float, ends: frozenset[int]) -> bool:
        """Append the drawn token; return True if it was the last token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return token in ends or len(self.tokens) == self.length_max

    def whole(self, ends: frozenset[int]) -> Sample:
        """Return the complete sample, once it has ended."""
        return Sample(
            tokens=pack_tokens(self.new_tokens),
            logprobs=pack_logprobs(self.logprobs),
            finish="stop" if self.tokens[-1] in ends else "length",
        )


class ModelSizes(Protocol):
    """The sizes of a loaded model that bound a request."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def positions_max(self) -> int: ...


def open_group(request: SampleRequest, model: ModelSizes, version: int | None) -> RunningGroup:
    """Return the group of a request; raise an error if the loaded model, of `version`, cannot serve it."""
    prompt = unpack_tokens(request.prompt).tolist()
    if request.version != version:
        raise EngineFailed(f"A request for version {request.version}, while version {version} is loaded.")
    if max(prompt) >= model.vocab_size:
        raise EngineFailed(f"The prompt has token {max(prompt)}, the vocabulary only {model.vocab_size}.")
    if len(prompt) + request.max_new_tokens > model.positions_max:
        raise EngineFailed(
            f"A prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones pass the model's "
            f"{model.positions_max} positions."
        )
    group = _unpacked(request, prompt)
    if request.prefixes:
        _check_prefixes(group, model.vocab_size)
    return group


def _unpacked(request: SampleRequest, prompt: list[int]) -> RunningGroup:
    """Return the group of a request, with its prefixes unpacked; a sample whose prefix is complete has ended."""
    if not request.prefixes:
        return RunningGroup(request, prompt, list(range(request.samples)), [[]] * request.samples)
    prefixes = [unpack_tokens(prefix.tokens).tolist() for prefix in request.prefixes]
    group = RunningGroup(request, prompt, [], prefixes)
    for number, prefix in enumerate(request.prefixes):
        if prefix.finish:
            group.ended[number] = Sample(tokens=b"", logprobs=b"", finish=prefix.finish)
        else:
            group.waiting.append(number)
    return group


def _check_prefixes(group: RunningGroup, vocab_size: int) -> None:
    """Require a prefix for each sample, with valid tokens, and at least one sample to continue."""
    request = group.request
    waiting = [group.prefixes[number] for number in group.waiting]
    if len(request.prefixes) != request.samples or not waiting:
        raise EngineFailed("The prefixes are not one for each sample, or leave nothing to sample.")
    if any(len(prefix) >= request.max_new_tokens or max(prefix, default=0) >= vocab_size for prefix in waiting):
        raise EngineFailed("A prefix has tokens beyond the vocabulary, or as many as a sample may have.")


def prompts_of(entering: Sequence[tuple[RunningGroup, list[int]]]) -> tuple[list[list[int]], list[int]]:
    """Return the token lists to compute before the first draw (prompt and prefix), with the samples per list."""
    prompts, copies = [], []
    for group, numbers in entering:
        own = [[*group.prompt, *group.prefixes[number]] for number in numbers] if group.request.prefixes else []
        prompts += own or [group.prompt]
        copies += [1] * len(own) or [len(numbers)]
    return prompts, copies


def since(told: dict[int, int], grown: Mapping[int, tuple[bytes, bytes, Finish]]) -> tuple[FragmentPart, ...]:
    """Return the tokens beyond those in `told`, which counts the reported ones by sample, and count them there."""
    parts = []
    for number, (tokens, logprobs, finish) in sorted(grown.items()):
        start = told.get(number, 0)
        if len(tokens) > 4 * start:
            new = {"tokens": tokens[4 * start :], "logprobs": logprobs[4 * start :]}
            parts.append(FragmentPart(sample=number, start=start, finish=finish, **new))
            told[number] = len(tokens) // 4
    return tuple(parts)


def failed(group: RunningGroup, error: SwarmError) -> GroupFailed:
    return GroupFailed.from_error(group.request.request_id, error)
