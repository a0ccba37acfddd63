"""Problems that are made and not read: by a my_task.py, and by reasoning-gym.

- A file has a function `problems(split, seed)` that gives rows, as a file of data has them, for "train" and "held_out",
  and if it likes for "validation".
- Generators may go on for ever: `data.size` problems are taken, or `GENERATED`.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from coordinator.config import Config
from coordinator.rewards.functions import module
from protocol.errors import ConfigInvalid
from protocol.tasks import Split

GENERATED = 10_000
HELD_OUT_GENERATED = 1_000

Rows = Iterable[tuple[Split | None, str, dict[str, Any]]]


def of_file(path: Path, config: Config) -> Iterator[tuple[Split, str, dict[str, Any]]]:
    function = getattr(module(str(path)), "problems", None)
    if not callable(function):
        raise ConfigInvalid(f"{path.name} has no function problems(split, seed).", hint="Copy that of docs/tasks.md.")
    splits: tuple[Split, ...] = ("held_out", "validation", "train")
    for split in splits:
        try:
            rows = function(split, config.round.seed)
        except Exception as error:  # whatever the operator's code raises is told to them
            raise ConfigInvalid(f"{path.name}: problems({split!r}) raised {type(error).__name__}: {error}.") from error
        most = (config.data.size or GENERATED) if split == "train" else HELD_OUT_GENERATED
        for number, row in enumerate(islice(rows or (), most), 1):
            where = f"{path.name}: {split} problem {number}"
            if not isinstance(row, dict):
                raise ConfigInvalid(f"{where} is no dict.", hint='Rows look like {"prompt": "…", "answer": "…"}.')
            yield split, where, row


def of_gym(config: Config) -> Iterator[tuple[None, str, dict[str, Any]]]:
    """A row names its generator, seed and index: the reward makes the rest of it anew."""
    from coordinator.rewards.gym import open_dataset

    parameters = dict(config.task.parameters)
    name = str(parameters.pop("generator", ""))
    seed = int(parameters.pop("seed", config.round.seed))
    size = config.data.size or GENERATED
    dataset = open_dataset(name, seed, size, parameters)
    for number in range(size):
        entry = dataset[number]
        made = {"generator": name, "seed": seed, "size": size, "index": number, "parameters": parameters}
        yield None, f"{name} {number}", {"prompt": entry["question"], "answer": entry["answer"], **made}
