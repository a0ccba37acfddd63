"""Preparation of a folder in hub format as the operator's next version: the round's policy with other weights.

- Tensors are compared before loading: transformers would fill missing ones with random numbers.
- Configuration and tokenizer must be equivalent to the round's, in any spelling. The round's own files are published,
  with the folder's weights in the type and the files of the round's versions, and with a new canary.
- If versions are an adapter beside a base, the folder must have an adapter of the same form; the base does not change.
"""

import filecmp
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.learner.start import require
from coordinator.publishing import weights
from protocol.errors import ConfigInvalid
from protocol.policy import adapter
from swarm_exact.merging import without_adapter

SAID_BY_THE_WRITER = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_attn_implementation",
    "auto_map",
}
"""The keys of a configuration that do not change the numbers that the model computes from the same weights."""


def prepare(folder: Path, current: Path, target: Path) -> None:
    """Write the folder's weights to `target` as a version of the policy of which `current` is a version."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates only a part of its functions
    write = _write_adapter if (current / adapter.CONFIG).exists() else _write_whole
    with TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        write(folder, current, made)
        made.rename(target)


def _write_whole(folder: Path, current: Path, made: Path) -> None:
    require(folder, str(folder))
    weights.require_same(weights.shapes(weights.weight_files(folder)), weights.shapes(weights.weight_files(current)))
    weights.require_finite(weights.weight_files(folder))
    _require_same_policy(folder, current)
    whole = made.with_name("whole")
    shutil.copytree(current, whole, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        (whole / path.name).symlink_to(path.absolute())
    TrainedPolicy(whole, TrainSettings(learning_rate=0.0)).writer.save_hub(made)


def _write_adapter(folder: Path, current: Path, made: Path) -> None:
    """Write the base's own files, and the folder's adapter in the format of this round's learner."""
    _require_adapter(folder, current)
    said = _json(current / adapter.CONFIG)
    settings = TrainSettings(
        learning_rate=0.0,
        lora_rank=said["r"],
        lora_alpha=said["lora_alpha"],
        lora_targets=tuple(said["target_modules"]),
    )
    with without_adapter(current) as base:
        shutil.copytree(base, made)
        policy = TrainedPolicy(base, settings)
    policy.continue_from(folder)
    policy.writer.save_adapter(made, said["base_model_name_or_path"])


def _require_adapter(folder: Path, current: Path) -> None:
    """Refuse a folder without an adapter of the same form for the same base."""
    hint = "Give an adapter for this round's base: a folder that `swarm-coordinator export --adapter` or peft wrote."
    if missing := [name for name in sorted(adapter.FILES) if not (folder / name).is_file()]:
        raise ConfigInvalid(
            f"This round's versions are an adapter beside its base, and {folder} has no {missing[0]}.", hint=hint
        )
    try:
        adapter.scale((folder / adapter.CONFIG).read_bytes())
    except ValueError as error:
        raise ConfigInvalid(f"{folder} has an adapter that cannot be used: {error}"[:300], hint=hint) from error
    matrices = [folder / adapter.WEIGHTS]
    weights.require_same(weights.shapes(matrices), weights.shapes([current / adapter.WEIGHTS]))
    weights.require_finite(matrices)
    for path in weights.weight_files(folder):
        if path.name != adapter.WEIGHTS and not _same_bytes(path, current / path.name):
            raise ConfigInvalid(f"{path} differs from this round's base, which cannot be changed.", hint=hint)


def _same_bytes(file: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(file, other, shallow=False)


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
            f"tokenizer.json of {folder} differs from that of this round's policy.",
            hint="Prompts, claims and audits use the tokens of the policy that the round started from.",
        )


def _config(folder: Path) -> Mapping[str, Any]:
    """Return a configuration as transformers reads it, which fills in omitted keys and converts old ones."""
    path = folder / "config.json"
    if not isinstance(_json(path), dict):
        raise ConfigInvalid(f"config.json of {folder} is not a JSON object.")
    try:
        read = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except Exception as error:  # configuration classes raise any kind of error
        raise ConfigInvalid(f"{path} cannot be read by transformers: {error}"[:300]) from error
    return {name: value for name, value in read.items() if name not in SAID_BY_THE_WRITER}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} cannot be read as JSON: {error}"[:300]) from error


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]
