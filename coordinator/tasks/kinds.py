"""The kinds of tasks beside the built-in ones, and the reward, suffix and label of each."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.config import Config
from coordinator.environments.games.episodes import GAMES, described
from coordinator.tasks.sandbox import Sandbox
from coordinator.tasks.task_process import TaskProcessSpec
from protocol.errors import ConfigInvalid, UnknownTask
from protocol.tasks import BUILT_IN

DATA, MATH, GYM = "data", "math", "reasoning-gym"
FROM_FILES = (DATA, MATH)
"""The tasks with the problems of `[data]`."""

SHIPPED = {
    DATA: ("problems from files, a folder or the hub, scored by [reward]", "exact"),
    MATH: ("problems with answers in mathematics, compared as such, the answer in \\boxed{}", "math"),
    GYM: ("any generator of reasoning-gym, by task.parameters.generator", "reasoning-gym"),
}
"""The description of each kind, and its own reward."""

BOXED = "\nReason step by step, and put the final answer within \\boxed{}."
"""The suffix of prompts of `math`, unless `data.suffix` gives another."""

REWARD_OF_FILE = "reward"
"""The reward function of a my_task.py, unless `reward.functions` names others."""

ENVIRONMENT_OF_FILE = "Environment"
"""The class of a my_task.py whose samples are episodes."""

FOLDER, NOTE = "task", "task.json"
"""The folder of the round's own copy of its problems, in the round's folder, and the note in it."""


@dataclass(frozen=True)
class EnvironmentKind:
    """An environment that is shipped: the places of its problems and of its class."""

    about: str
    problems: str
    episode: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters beside those of the operator."""
    network: bool = False
    """True if an episode needs connections, which the operator has to permit."""
    listens: bool = False
    """True if its parts talk to each other through servers of their own, in the environment's process."""


_game = partial(
    EnvironmentKind,
    problems="coordinator.environments.games.episodes:problems",
    episode="coordinator.environments.games.episodes:GameEpisode",
)


def _library(about: str, module: str, episode: str, *, network: bool = False, listens: bool = False) -> EnvironmentKind:
    place = f"coordinator.environments.{module}"
    return EnvironmentKind(about, f"{place}:problems", f"{place}:{episode}", network=network, listens=listens)


ENVIRONMENTS: Mapping[str, EnvironmentKind] = {
    **{name: _game(described(name), parameters={"game": name}) for name in sorted(GAMES)},
    "verifiers": _library(
        "an environment of verifiers, by task.parameters.id",
        "verifiers_tasks",
        "VerifiersEpisode",
        network=True,
        listens=True,
    ),
    "openenv": _library(
        "an environment of an OpenEnv server, by task.parameters.url", "openenv_server", "OpenEnvEpisode", network=True
    ),
    "nemo-gym": _library(
        "a resources server of NeMo-Gym, by task.parameters.url", "nemo_gym_server", "NemoGymEpisode", network=True
    ),
    "trl": _library(
        "TRL's environment_factory or tools, by task.parameters.factory or .tools", "trl_tools", "TrlEpisode"
    ),
    "textarena": _library("a game of TextArena, by task.parameters.id", "textarena_game", "TextArenaEpisode"),
    "reasoning-gym-tries": _library(
        "reasoning-gym with feedback and further tries, by task.parameters.generator", "gym_retries", "GymEpisode"
    ),
}
"""The environments that are shipped, by the name of the task."""

KNOWN = (*BUILT_IN, *SHIPPED, *ENVIRONMENTS)


def require_known(name: str) -> None:
    if not (name in KNOWN or name.endswith(".py")):
        raise UnknownTask(
            f"There is no task {name!r}.", hint=f"Use one of {', '.join(KNOWN)}, or a file that ends in .py."
        )


def require_granted(config: Config) -> None:
    """Refuse an environment that needs connections, unless the operator permits them."""
    kind = ENVIRONMENTS.get(config.task.name)
    if kind is not None and kind.network and not config.reward.network:
        raise ConfigInvalid(
            f"Task {config.task.name} connects to a server, and reward.network is off.",
            hint="Set reward.network = true: its processes may then connect to anything.",
        )


def code_files(config: Config) -> tuple[str, ...]:
    """Return the files of the operator's code that the settings name."""
    places = [config.task.name, *(place.rpartition(":")[0] for place in config.reward.functions)]
    return tuple(dict.fromkeys(place for place in places if place.endswith(".py")))


def unused_settings(config: Config) -> Iterator[tuple[str, ConfigInvalid]]:
    """Yield each setting that the task would ignore, with the error that says so."""
    name = config.task.name
    for key in ("train", "eval"):
        if getattr(config.data, key) and name not in FROM_FILES:
            hint = "Set task.name to data or math, or remove this setting."
            if name.endswith(".py"):
                hint = "Read that file in `problems(split, seed)`, and remove this setting."
            yield f"data.{key}", ConfigInvalid(f"Task {name} does not read data.{key}.", hint=hint)
    if config.reward.functions and environment_of(config):
        yield (
            "reward.functions",
            ConfigInvalid(
                f"Task {name} is an environment and gives the reward itself: reward.functions would not run.",
                hint="Remove them; an environment of your own can call them in its `reward`.",
            ),
        )


def require_use(config: Config) -> None:
    """Refuse settings that the task would ignore."""
    for _, error in unused_settings(config):
        raise error


def task_label(config: Config) -> str:
    """Return the task's name for nodes and visitors, which contains no path of this machine."""
    return Path(config.task.name).stem if config.task.name.endswith(".py") else config.task.name


def suffix_of(config: Config) -> str:
    default = BOXED if config.task.name == MATH else ""
    return default if config.data.suffix is None else config.data.suffix


def functions_of(config: Config) -> tuple[str, ...]:
    """Return the reward functions of a task that is not built in; none if it is an environment."""
    name = config.task.name
    if config.reward.functions:
        return config.reward.functions
    if name in ENVIRONMENTS:
        return ()
    return (f"{name}:{REWARD_OF_FILE}",) if name.endswith(".py") else (SHIPPED[name][1],)


def environment_of(config: Config) -> tuple[str, Mapping[str, Any]] | None:
    """Return the place of the environment's class, and its parameters; None if the samples are no episodes.

    For a file of the operator, the round's copy of its problems says whether it has an environment.
    """
    name, parameters = config.task.name, dict(config.task.parameters)
    if name in ENVIRONMENTS:
        kind = ENVIRONMENTS[name]
        return kind.episode, {**parameters, **kind.parameters}
    note = config.round.directory / FOLDER / NOTE
    if name.endswith(".py") and note.exists() and json.loads(note.read_text()).get("environment"):
        return _absolute(f"{name}:{ENVIRONMENT_OF_FILE}"), parameters
    return None


def turn_tokens_max(config: Config) -> int:
    """Return the most tokens of a turn; 0 if the samples are no episodes."""
    return config.episode.turn_tokens_max if environment_of(config) else 0


def process_spec(config: Config, round_folder: Path | None = None) -> TaskProcessSpec:
    """Return the specification of the task's processes; `round_folder` is hidden instead of the round's own."""
    reward, environment, name = config.reward, environment_of(config), config.task.name
    functions = () if environment else functions_of(config)
    weights = reward.weights or (1.0,) * len(functions)
    return TaskProcessSpec(
        tuple((_absolute(place), weight) for place, weight in zip(functions, weights, strict=True)),
        timeout_s=reward.timeout_s,
        processes=reward.processes,
        memory_mib=reward.memory_mib,
        variables=reward.variables,
        environment=environment,
        sandbox=Sandbox(
            network=reward.network,
            listening=reward.network and name in ENVIRONMENTS and ENVIRONMENTS[name].listens,
            readable=(*map(_whole, reward.readable), *_files_in(config.task.parameters)),
            writable=tuple(map(_whole, reward.writable)),
            hidden=tuple(
                map(_whole, (round_folder or config.round.directory, config.round.tls_key, config.payouts.evm_key))
            ),
            processes_max=reward.processes_max,
            scratch_mib=reward.scratch_mib,
        ),
    )


def _whole(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _files_in(value: Any) -> Iterator[str]:
    """Yield the files that parameters name, such as `my_task.py:Shop` or `rows.jsonl`."""
    if isinstance(value, str):
        path = Path(value.partition(":")[0]).absolute()
        if path.is_file():
            yield str(path.parent if path.suffix == ".py" else path)
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _files_in(each)


def _absolute(place: str) -> str:
    """Return the place of a function with an absolute path, so that it is valid in any folder."""
    where, colon, name = place.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if colon and where.endswith(".py") else place
