"""The kinds of tasks beside the built-in ones, and the reward, suffix and label of each."""

from pathlib import Path

from coordinator.config import Config
from coordinator.tasks.reward_process import RewardSpec
from coordinator.tasks.sandbox import Sandbox
from protocol.errors import UnknownTask
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


KNOWN = (*BUILT_IN, *SHIPPED)


def require_known(name: str) -> None:
    if not (name in KNOWN or name.endswith(".py")):
        raise UnknownTask(
            f"There is no task {name!r}.", hint=f"Use one of {', '.join(KNOWN)}, or a file that ends in .py."
        )


def task_label(config: Config) -> str:
    """Return the task's name for nodes and visitors, which contains no path of this machine."""
    return Path(config.task.name).stem if config.task.name.endswith(".py") else config.task.name


def suffix_of(config: Config) -> str:
    default = BOXED if config.task.name == MATH else ""
    return default if config.data.suffix is None else config.data.suffix


def functions_of(config: Config) -> tuple[str, ...]:
    """Return the reward functions of a task that is not built in."""
    name = config.task.name
    if config.reward.functions:
        return config.reward.functions
    return (f"{name}:{REWARD_OF_FILE}",) if name.endswith(".py") else (SHIPPED[name][1],)


def reward_spec(config: Config, round_folder: Path | None = None) -> RewardSpec:
    """Return the specification of the task's reward processes; `round_folder` is hidden instead of the round's own."""
    reward, functions = config.reward, functions_of(config)
    weights = reward.weights or (1.0,) * len(functions)
    return RewardSpec(
        tuple((_absolute(place), weight) for place, weight in zip(functions, weights, strict=True)),
        timeout_s=reward.timeout_s,
        processes=reward.processes,
        memory_mib=reward.memory_mib,
        environment=reward.environment,
        sandbox=Sandbox(
            network=reward.network,
            readable=tuple(map(_whole, reward.readable)),
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


def _absolute(place: str) -> str:
    """Return the place of a function with an absolute path, so that it is valid in any folder."""
    where, colon, name = place.rpartition(":")
    return f"{Path(where).absolute()}:{name}" if colon and where.endswith(".py") else place
