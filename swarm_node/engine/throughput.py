"""Measurement of this machine's sampling speed: prompts of the round's task, at the lengths that the policy gives.

- A task that is not built in belongs to the operator, and its prompts come with leases: prompts of another task replace
  them.
- Only sampling is timed, inside the engine; prompts and decoding are timed separately.
- The policy ends its completions itself, so the mix of lengths is its own. Every token that would be paid counts.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

from protocol.errors import SwarmError
from protocol.policy.manifest import Sampler
from protocol.tasks import stand_in
from swarm_node.engine.client import EngineClient
from swarm_node.engine.messages import GroupFailed, SampleRequest, SamplingStats

FIRST_GROUPS, FIRST_SAMPLES, FIRST_TOKENS_MAX = 8, 8, 32
"""Samples for measuring a card's speed before its first lease; after that, the leases are measured."""


class SampleWork(NamedTuple):
    """Prompts and settings of a measurement."""

    task: str
    groups: int
    samples: int
    max_new_tokens: int
    temperature: float

    @classmethod
    def first(cls, task: str, sampler: Sampler) -> Self:
        """Return the measurement before the first lease."""
        tokens_max = min(sampler.max_new_tokens, FIRST_TOKENS_MAX)
        return cls(task, FIRST_GROUPS, FIRST_SAMPLES, tokens_max, sampler.temperature)

    async def requests(self, engine: EngineClient, version: int) -> list[SampleRequest]:
        """Return the groups to sample, encoded by the loaded policy's tokenizer; they are the same every time."""
        texts = [stand_in(self.task, number) for number in range(self.groups)]
        prompts = await engine.encoded(texts)
        return [
            SampleRequest(
                request_id=str(number),
                version=version,
                prompt=prompt,
                seed=number,
                samples=self.samples,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
            )
            for number, prompt in enumerate(prompts)
        ]


class Throughput(NamedTuple):
    """Result of a measurement."""

    tokens_per_s: float
    """Tokens that would be paid, divided by the whole time."""
    prompt_tokens_per_s: float
    decoded_tokens_per_s: float
    tokens: int

    @staticmethod
    def of(measured: SamplingStats) -> "Throughput":
        tokens = measured.first_tokens + measured.later_tokens
        return Throughput(
            tokens_per_s=_rate(tokens, measured.prefill_s + measured.decode_s),
            prompt_tokens_per_s=_rate(measured.prompt_tokens, measured.prefill_s),
            decoded_tokens_per_s=_rate(measured.later_tokens, measured.decode_s),
            tokens=tokens,
        )


async def measure(
    engine: EngineClient, requests: list[SampleRequest], *, at_once: int, on_group: Callable[[], None] = lambda: None
) -> Throughput:
    """Sample the requests, at most `at_once` at a time, and measure the speed."""
    await engine.measured()
    for start in range(0, len(requests), at_once):
        await engine.submit(requests[start : start + at_once])
        while group := await engine.finished():
            if isinstance(group, GroupFailed):
                raise SwarmError.from_wire(group.model_dump())
            on_group()
    return Throughput.of(await engine.measured())


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
