"""Settings that the first launch fixes, and the file that says that a round was not launched yet.

- `init` fixes nothing: until the first launch, every setting may change, and what was made from it is made again.
- `resolved.json` has the settings of the last launch, or of `init`. Beside it, `draft` exists until the first launch:
  a round of an older release has no such file, so its settings are fixed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.config.whole import Config
from protocol.errors import ConfigInvalid

RESOLVED, DRAFT = "resolved.json", "draft"

FIXED = (
    "round.seed",
    "round.unit",
    "round.unit_decimals",
    "model.path",
    "model.revision",
    "task.name",
    "task.parameters",
    "data.train",
    "data.eval",
    "data.revision",
    "data.columns",
    "data.chat",
    "data.system_prompt",
    "data.template_arguments",
    "data.suffix",
    "data.shuffle",
    "data.size",
    "sampling.temperature",
    "sampling.samples_per_group",
    "sampling.max_new_tokens",
    "learner.external",
    "learner.groups_per_update",
    "learner.lora_rank",
    "learner.lora_targets",
    "market.budget_micros",
    "store.url",
)
"""Settings on which the batches, versions, leases, ledger or first root document of a round depend."""


@dataclass(frozen=True)
class FixedChange:
    """A fixed setting with another value than at the first launch."""

    path: str
    was: Any
    wanted: Any


def is_round(folder: Path) -> bool:
    """Return True if `init` or `launch` has made a round in this folder."""
    return (folder / RESOLVED).exists()


def require_round(folder: Path) -> None:
    """Raise an error if neither `init` nor `launch` has made a round in this folder."""
    if not is_round(folder):
        raise no_round(folder)


def load_resolved(folder: Path) -> Config:
    """Return the settings of the last launch, or of `init`, of the round in this folder."""
    require_round(folder)
    try:
        return Config.model_validate_json((folder / RESOLVED).read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigInvalid(
            f"{folder / RESOLVED} is damaged, or of another release: {f'{place}: ' if place else ''}{first['msg']}.",
            hint="Restore it from a backup of the round, or use the release that launched the round last.",
        ) from error


def no_round(folder: Path) -> ConfigInvalid:
    """Return the error for a folder without a round."""
    return ConfigInvalid(
        f"There is no round in {folder}.",
        hint="Create one with `swarm-coordinator init`. If there is one elsewhere, run the command in the folder where "
        "you launched it: a relative round.directory counts from the current folder.",
    )


def was_launched(folder: Path) -> bool:
    """Return True if the round in this folder was launched: its fixed settings cannot change any more."""
    return is_round(folder) and not (folder / DRAFT).exists()


def earlier_ids(folder: Path) -> list[str]:
    """Return the ids that a round had before its unit was changed; they are in the file of the draft."""
    return (folder / DRAFT).read_text().split()


def changes(config: Config) -> list[FixedChange]:
    """Return the fixed settings that differ from those of the round that was launched in this folder."""
    folder = config.round.directory
    if not was_launched(folder):
        return []
    before = load_resolved(folder)
    pairs = ((path, _value(before, path), _value(config, path)) for path in FIXED)
    return [FixedChange(path, was, wanted) for path, was, wanted in pairs if was != wanted]


def _value(config: Config, path: str) -> Any:
    section, _, key = path.partition(".")
    return getattr(getattr(config, section), key)
