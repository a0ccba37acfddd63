"""Where the starting policy comes from: made here, copied from a folder, or downloaded from the hub.

- What is taken is weights, configuration and tokenizer: no code, and no pickle.
- The round keeps a copy of its own, so that nobody changes it under a learner that restarts.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from coordinator.config import ModelSection
from protocol import adapter
from protocol.errors import ConfigInvalid
from protocol.policy_folder import kind_of

HUB, EMBEDDED = "hf://", "embedded"

WANTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "special_tokens*",
    "chat_template*",
)


def place(model: ModelSection, target: Path, *, seed: int, words: Sequence[str] = ()) -> None:
    """Put the starting policy into a folder that is made for it; an embedded one is to know these words."""
    shutil.rmtree(target, ignore_errors=True)
    if model.path == EMBEDDED:
        from coordinator.learner.embedded import make_policy

        make_policy(target, seed=seed, words=words)
        return
    source = _downloaded(model) if model.path.startswith(HUB) else Path(model.path)
    require(source, f"model.path {model.path}")
    target.mkdir(parents=True)
    for path in sorted({path for pattern in WANTED for path in source.glob(pattern)}):
        if kind_of(path.name):
            shutil.copyfile(path, target / path.name)


def _downloaded(model: ModelSection) -> Path:
    """The folder of the hub's cache that holds a repository's files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found: str = snapshot_download(
            model.path.removeprefix(HUB), revision=model.revision or None, allow_patterns=list(WANTED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigInvalid(
            f"{model.path} cannot be downloaded: {reason}",
            hint="Gated models need HF_TOKEN; with HF_HUB_OFFLINE=1 only the cache is looked at.",
        ) from error
    return Path(found)


def require_here(model: ModelSection) -> None:
    """Say what the starting policy lacks, as far as that is known without fetching or making it."""
    if model.path != EMBEDDED and not model.path.startswith(HUB):
        require(Path(model.path), f"model.path {model.path}")


def require(source: Path, name: str) -> None:
    """Say what a folder lacks, before anything is started on it."""
    for needed in ("config.json", "tokenizer.json"):
        if not (source / needed).is_file():
            raise ConfigInvalid(f"{name} is no folder in hub format: it has no {needed}.")
    if (source / adapter.CONFIG).exists():
        raise ConfigInvalid(
            f"{name} has an adapter beside its weights, or nothing else.",
            hint="Merge it into its base first, as `swarm-coordinator export` does.",
        )
    if not any(source.glob("*.safetensors")):
        raise ConfigInvalid(
            f"{name} has no weights as safetensors.", hint="Pickled weights run code; convert them first."
        )
