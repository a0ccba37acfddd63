"""Rollouts for TRL's `GRPOTrainer`, sampled by the swarm.

    GRPOTrainer(model=model, rollout_func=SwarmRollouts(swarm), …)

- The trainer's weights are published before the first samples of each step. Only that version answers, so that the
  samples are on-policy, as TRL expects of a `rollout_func`.
- TRL repeats a prompt for each of its samples; repeated prompts become one request.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from echo_swarm.asynchronous import Prompt
from echo_swarm.blocking import Swarm
from echo_swarm.rollouts import Rollout


class SwarmRollouts:
    """A `rollout_func` of TRL."""

    def __init__(self, swarm: Swarm, *, max_tokens: int | None = None) -> None:
        self._swarm, self._max_tokens = swarm, max_tokens
        self._step: int | None = None
        """The trainer's step whose weights were published last."""
        self.version = 0
        """The version that answers."""

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> Mapping[str, list[Any]]:
        """Return the samples of these prompts, in their order."""
        self._publish(trainer)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        sampled = dict[int, Rollout]()
        for size in {size for _, size in groups}:
            places = [place for place, (_, own) in enumerate(groups) if own == size]
            asked = [groups[place][0] for place in places]
            rollouts = self._swarm.sample(asked, size, max_tokens=self._max_tokens, version=self.version)
            sampled.update(zip(places, rollouts, strict=True))
        rows = [
            (sampled[place].prompt_token_ids, sample) for place in sorted(sampled) for sample in sampled[place].samples
        ]
        return {
            "prompt_ids": [list(prompt) for prompt, _ in rows],
            "completion_ids": [list(sample.token_ids) for _, sample in rows],
            "logprobs": [list(sample.logprobs) for _, sample in rows],
        }

    def _publish(self, trainer: Any) -> None:
        """Publish the trainer's weights, if they have changed since they were published last."""
        step = int(trainer.state.global_step)
        if step == self._step:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.version = self._swarm.publish(model, updates=max(1, step - (self._step or 0)))
        self._step = step
