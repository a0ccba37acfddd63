"""The built-in reward `reasoning-gym`: the generator's own score, of what stands in <answer> tags, or of all."""

import json
import re
from functools import lru_cache
from typing import Any

from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ModuleNotFoundError as missing:
    raise ConfigInvalid(
        f"Task reasoning-gym needs its library ({missing}).", hint="pip install 'echo-swarm[tasks]'"
    ) from None

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reward(problem: Problem, completion: str) -> Reward:
    made = problem.columns
    dataset = _dataset(made["generator"], made["seed"], made["size"], json.dumps(made["parameters"], sort_keys=True))
    tagged = _TAGGED.findall(completion)
    said = (tagged[-1] if tagged else completion).strip()
    return Reward(float(dataset.score_answer(said, dataset[made["index"]])), "ok" if said else "invalid")


@lru_cache(maxsize=16)
def _dataset(name: str, seed: int, size: int, parameters: str) -> Any:
    return open_dataset(name, seed, size, json.loads(parameters))


def open_dataset(name: str, seed: int, size: int, parameters: dict[str, Any]) -> Any:
    """A generator of reasoning-gym; the same problems for the same arguments."""
    if name not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ConfigInvalid(
            f"reasoning-gym has no generator {name!r}.", hint=f"Set task.parameters.generator to one of: {known}."
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **parameters)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigInvalid(f"Generator {name} refuses its parameters: {error}.") from error
