"""A folder in hub format as the operator's next version: is it this round's policy with other weights?

- Tensors are compared before anything is loaded: transformers would fill in by chance what is missing.
- Configuration and tokenizer must say what the round's say; the round's own files are published, with the folder's
  weights in the type and the files in which its versions come, and a canary of their own.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.learner.policy import Policy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.start import require
from coordinator.publishing import weights
from protocol.errors import ConfigInvalid

SAID_BY_THE_WRITER = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_attn_implementation",
}
"""Keys of a configuration that change no number that the model computes from the same weights."""


def prepare(folder: Path, current: Path, target: Path) -> None:
    """Write the folder's weights as a version of the policy that `current` is a version of."""
    require(folder, str(folder))
    weights.require_same(weights.shapes(weights.of(folder)), weights.shapes(weights.of(current)))
    weights.require_finite(weights.of(folder))
    _require_same_policy(folder, current)
    beside = target.with_name(f"{target.name}.new")
    whole = target.with_name(f"{target.name}.whole")
    for path in (beside, whole):
        shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.copytree(current, whole, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
            (whole / path.name).symlink_to(path.absolute())
        Policy(whole, TrainSettings(learning_rate=0.0)).save_hub(beside)
        beside.rename(target)
    finally:
        for path in (beside, whole):
            shutil.rmtree(path, ignore_errors=True)


def _require_same_policy(folder: Path, current: Path) -> None:
    theirs, ours = _config(folder), _config(current)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigInvalid(
                f"config.json of {folder} has {name} = {_short(theirs.get(name))}, this round's policy "
                f"{_short(ours.get(name))}.",
                hint="Only weights of the same architecture can be published.",
            )
    if _json(folder / "tokenizer.json") != _json(current / "tokenizer.json"):
        raise ConfigInvalid(
            f"tokenizer.json of {folder} is not that of this round's policy.",
            hint="Prompts, claims and audits are counted in the tokens of the policy that the round started from.",
        )


def _config(folder: Path) -> Mapping[str, Any]:
    said = _json(folder / "config.json")
    if not isinstance(said, dict):
        raise ConfigInvalid(f"config.json of {folder} is no object.")
    return {name: value for name, value in said.items() if name not in SAID_BY_THE_WRITER}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} cannot be read as JSON: {error}"[:300]) from error


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
