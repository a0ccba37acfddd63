"""The source of the starting policy: generated, copied from a folder, or downloaded from the hub.

- Only weights, configuration and tokenizer are copied: no code, and no pickle.
- The round keeps its own copy, so that the policy does not change while the learner restarts.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coordinator.config import Config, ModelSection, manual
from coordinator.config.round import HUB
from coordinator.environments.games.episodes import GAMES, open_game
from coordinator.learner.embedded_text import text_files
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.policy import adapter, model_config
from protocol.policy.codec import PolicyCodec
from protocol.policy.folder import kind_of

EMBEDDED = manual.EMBEDDED

WANTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "special_tokens*",
    "chat_template*",
)

HUB_TIMEOUT_S = 5.0
"""The time in which the hub must answer the first request."""

TEXT_FILES = tuple(pattern for pattern in WANTED if "safetensors" not in pattern)
"""The files that say how a text becomes tokens."""


class HubUnreachable(ConfigInvalid):
    """The model hub does not answer, and its cache on this machine lacks the file."""


def place(model: ModelSection, target: Path, *, seed: int, words: Sequence[str] = ()) -> None:
    """Create the folder `target` with the starting policy; `words` are the tokens that an embedded one gets."""
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


def _downloaded(model: ModelSection, patterns: Sequence[str] = WANTED) -> Path:
    """Return the folder of the hub's cache with the repository's files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder: str = snapshot_download(
            model.path.removeprefix(HUB), revision=model.revision or None, allow_patterns=list(patterns)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigInvalid(
            f"{model.path} cannot be downloaded: {reason}",
            hint="Gated models need HF_TOKEN; with HF_HUB_OFFLINE=1 only the cache is used.",
        ) from error
    return Path(folder)


def require_here(model: ModelSection) -> None:
    """Refuse an incomplete starting policy, as far as it can be checked without downloading or generating it."""
    if model.path != EMBEDDED and not model.path.startswith(HUB):
        require(Path(model.path), f"model.path {model.path}")


def require_trained(config: Config) -> None:
    """Refuse adapters of the embedded policy, which this round's learner would have to train."""
    if config.model.path == EMBEDDED and config.learner.lora_rank and not config.learner.external:
        raise ConfigInvalid(
            "The embedded policy is untrained, so adapters cannot be trained on it.",
            hint="Set learner.lora_rank=0, or set model.path to a trained policy.",
        )


def require_usable(model: ModelSection) -> None:
    """Refuse a policy that cannot be trained or sampled, by its configuration, before anything is created for it.

    If the configuration cannot be read on this machine, the learner checks it, perhaps on another machine.
    """
    if reason := model_config.reason_to_refuse(_configuration(model)):
        raise ConfigInvalid(
            f"model.path {model.path} cannot be used: {reason}.",
            hint="docs/architectures.md lists the architectures that work.",
        )


def text_reader(config: Config) -> Callable[[str], bytes]:
    """Return a reader of the files that say how a text becomes tokens; from the hub, only these are downloaded.

    Raises `ConfigInvalid` if they cannot be read on this machine.
    """
    model = config.model
    if model.path == EMBEDDED:
        name, parameters = config.task.name, config.task.parameters
        words = open_game(name, parameters).words if name in GAMES else ()  # type: ignore[arg-type]  # it checks the types
        return text_files(words).__getitem__
    try:
        source = _downloaded(model, TEXT_FILES) if model.path.startswith(HUB) else Path(model.path)
    except ImportError as error:  # the learner is on another machine
        raise ConfigInvalid("The hub cannot be queried: huggingface_hub is not installed.") from error
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ConfigInvalid(f"model.path {model.path} has no {name} on this machine.")
    return lambda name: (source / name).read_bytes()


def require_text(model: ModelSection, read_file: Callable[[str], bytes]) -> None:
    """Refuse a policy whose files for encoding text are damaged, such as by a download that was cut off."""
    if model.path == EMBEDDED:
        return
    _require_undamaged(model, "config.json", read_file, _check_object)
    _require_undamaged(model, "tokenizer.json", read_file, _check_tokenizer)
    with suppress(FileNotFoundError):  # not every policy has this file
        _require_undamaged(model, "tokenizer_config.json", read_file, _check_object)


def _require_undamaged(
    model: ModelSection, name: str, read_file: Callable[[str], bytes], check: Callable[[bytes], None]
) -> None:
    try:
        check(read_file(name))
    except FileNotFoundError:
        raise
    except Exception as error:  # `tokenizers` raises bare exceptions
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise ConfigInvalid(
            f"{name} of model.path {model.path} is damaged or unreadable: {reason}.",
            hint="Download the model again, after deleting the model from the hub's cache."
            if model.path.startswith(HUB)
            else "Download the model again, into that folder.",
        ) from error


def _check_object(data: bytes) -> None:
    if not isinstance(json.loads(data), dict):
        raise ValueError("it is not a JSON object")


def _check_tokenizer(data: bytes) -> None:
    model_config.require_tokenizer(data)
    PolicyCodec(data.decode())


def warnings(model: ModelSection) -> list[str]:
    """Return the warnings about a starting policy that is allowed."""
    config = _configuration(model)
    if "float16" not in (config.get("dtype"), config.get("torch_dtype")):
        return []
    return [
        f"model.path {model.path} is in float16: it is trained in float32, and versions are published in float16. "
        "The learner stops if a weight grows beyond 65,504; nodes on a GPU compute in float16."
    ]


def configuration_file(model: ModelSection) -> Path | None:
    """Return the config.json of a policy that is not embedded; from the hub, only this file is downloaded."""
    if model.path == EMBEDDED:
        return None
    if not model.path.startswith(HUB):
        _require_folder(Path(model.path), f"model.path {model.path}")
    file = _downloaded_configuration(model) if model.path.startswith(HUB) else Path(model.path) / "config.json"
    if not file.is_file() or file.stat().st_size > limits.POLICY_CONFIG_MAX_BYTES:
        raise ConfigInvalid(f"model.path {model.path} has no readable config.json.")
    return file


def _configuration(model: ModelSection) -> dict[str, Any]:
    """Return the content of config.json; empty if it cannot be read."""
    try:
        file = configuration_file(model)
        content = json.loads(file.read_bytes()) if file else {}
    except (OSError, ValueError, RecursionError, ConfigInvalid):
        return {}
    return content if isinstance(content, dict) else {}


def _downloaded_configuration(model: ModelSection) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:  # the learner is on another machine
        raise ConfigInvalid("The hub cannot be queried: huggingface_hub is not installed.") from error
    unreachable = _why_hub_is_unreachable()
    try:
        file = hf_hub_download(
            model.path.removeprefix(HUB),
            "config.json",
            revision=model.revision or None,
            local_files_only=bool(unreachable),
        )
        return Path(file)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        if unreachable:
            raise HubUnreachable(
                f"The model hub cannot be reached ({unreachable}), and the config.json of {model.path} is not here.",
                hint="Check the network, or set model.path to a folder in hub format on this machine.",
            ) from error
        raise ConfigInvalid(
            f"config.json of {model.path} cannot be downloaded.",
            hint="Check the name and the network, or set model.path to a folder with this model's config.json.",
        ) from error


def _why_hub_is_unreachable() -> str:
    """Return why the hub does not answer, after one request: its own client repeats each for half a minute."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    client_error: Any = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except (client_error, OfflineModeIsEnabled, OSError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return ""


def is_name_on_hub(place: str) -> bool:
    """Return True for `owner/name`, which may be a folder or be meant as a name on the hub."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", place))


def require(source: Path, name: str) -> None:
    """Refuse a folder that is incomplete, before anything is started on it."""
    _require_folder(source, name)
    for needed in ("config.json", "tokenizer.json"):
        if not (source / needed).is_file():
            raise ConfigInvalid(f"{name} is not a folder in hub format: it has no {needed}.")
    if (source / adapter.CONFIG).exists():
        raise ConfigInvalid(
            f"{name} has an adapter, beside its weights or alone.",
            hint="Merge it into its base first, as `swarm-coordinator export` does.",
        )
    if not any(source.glob("*.safetensors")):
        raise ConfigInvalid(
            f"{name} has no weights as safetensors.", hint="Pickled weights run code; convert them first."
        )
    require_text(ModelSection(path=str(source)), lambda each: (source / each).read_bytes())
    require_usable(ModelSection(path=str(source)))


def _require_folder(source: Path, name: str) -> None:
    if not source.is_dir():
        hub = f"For a model on the hub, write {HUB}{source}. " if is_name_on_hub(str(source)) else ""
        raise ConfigInvalid(f"{name} does not exist.", hint=f"{hub}Relative paths start at the current folder.")
