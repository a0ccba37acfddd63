"""Problems of reasoning-gym with further tries: a wrong answer gets feedback, up to a number of tries.

    [task.parameters]
    generator = "chain_sum"    any generator of reasoning-gym; its own parameters follow in `args`
    tries = 3
    discount = 1.0             factor of the score for each try before the right one

- The score is the generator's own, of the last answer. Only a score of 1 ends the episode before its last try.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from json import dumps, loads
from typing import Any

from coordinator.environments.adapting import Row, library, seeds
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

INSTRUCTION = "\n\nGive your answer between <answer> and </answer>."


def problems(
    split: str,
    seed: int,
    size: int,
    *,
    generator: str,
    args: Mapping[str, Any] | None = None,
    tries: int = 3,
    discount: float = 1.0,
) -> Iterator[Row]:
    """Return a problem of the generator for each seed of the split."""
    if tries < 1 or not 0 <= discount <= 1:
        raise ConfigInvalid("`tries` must be at least 1, and `discount` between 0 and 1.")
    for drawn in seeds(split, seed, size):
        made = {"generator": generator, "seed": drawn, "size": 1, "index": 0, "parameters": dict(args or {})}
        entry = _entry(generator, drawn, dumps(args or {}, sort_keys=True))
        content = entry["question"] + INSTRUCTION
        yield {"prompt": [{"role": "user", "content": content}], "answer": str(entry["answer"]), **made}


@lru_cache(maxsize=64)
def _entry(generator: str, seed: int, args: str) -> Any:
    library("reasoning_gym", "tasks")
    from coordinator.environments.gym_answers import open_dataset

    return open_dataset(generator, seed, 1, loads(args))[0]


class GymEpisode:
    """A problem, and the tries so far."""

    def __init__(
        self, problem: Problem, generator: str, args: Any = None, tries: int = 3, discount: float = 1.0
    ) -> None:
        library("reasoning_gym", "tasks")
        self._problem, self._tries_max, self._discount = problem, tries, discount
        self._tries = 0
        self._judged = Reward(0.0, "invalid")

    def step(self, turn: str) -> str | None:
        from coordinator.environments.gym_answers import reward

        self._tries += 1
        self._judged = reward(self._problem, turn)
        left = self._tries_max - self._tries
        if self._judged.score >= 1 or left == 0:
            return None
        fault = "is wrong" if self._judged.status == "ok" else "cannot be read"
        return f"Your answer {fault}. You have {left} more {'try' if left == 1 else 'tries'}.{INSTRUCTION}"

    def reward(self) -> Reward:
        score = self._judged.score * self._discount ** max(self._tries - 1, 0)
        return Reward(score, self._judged.status, {"tries": float(self._tries)})


Environment = GymEpisode
