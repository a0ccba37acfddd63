"""Export of a round's policy, as a folder that transformers and other programs load, or as a file for llama.cpp.

- The newest policy is the newest published version. Only if it is not published yet, it is read from the learner's
  checkpoint, which is six times as large and needs the learner's memory. With `learner.external`, the checkpoint is
  only the start, and is never exported.
- An adapter is merged into its base, unless `adapter` asks for it alone, in peft's format.
- The llama engine converts such a folder to a GGUF file, since it knows llama.cpp's format of each architecture. It
  runs as a separate program: the coordinator imports nothing of the node.
- A running learner replaces its checkpoints: the newest is held while it is read.
- A folder or file appears whole or not at all, and never replaces another. What is not complete is in a hidden folder
  beside it, which is removed at the end, also by SIGTERM and Ctrl-C, and after a kill by the next export to that place.
"""

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.audit.case import RoundArchive
from coordinator.config import Config, fixed
from coordinator.publishing.best import FILE, find_best
from protocol.errors import ConfigInvalid, EngineFailed, NotFound
from protocol.policy import canary
from protocol.policy.adapter import CONFIG

log = logging.getLogger(__name__)

REFUSED = 2
"""The exit code of the GGUF program if it failed and gives a reason."""


def export(config: Config, target: Path, *, version: int = 0, adapter: bool = False, best: bool = False) -> int:
    """Write a version, the best version, or for 0 the newest policy; return its update."""
    with _beside(target) as scratch:
        folder = scratch / "policy"
        update = _write(config, folder, version=version, adapter=adapter, best=best)
        folder.rename(target)
    return update


def export_gguf(config: Config, target: Path, *, version: int = 0, best: bool = False, dtype: str = "auto") -> int:
    """Write the same as a GGUF file, with the numbers in `dtype`, or for "auto" in the policy's own type."""
    with _beside(target) as scratch:
        folder, file = scratch / "policy", scratch / "policy.gguf"
        update = _write(config, folder, version=version, best=best)
        _convert(folder, file, dtype)
        file.rename(target)
    return update


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Make a hidden folder beside a new target, and remove it at the end of the block, or of the process by SIGTERM."""
    if target.exists():
        raise ConfigInvalid(f"{target} exists already.", hint="Name a new folder or file.")
    scratch = target.absolute().with_name(f".{target.name}.export")
    shutil.rmtree(scratch, ignore_errors=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def _write(config: Config, folder: Path, *, version: int, adapter: bool = False, best: bool = False) -> int:
    make = _best if best else _version if version or config.learner.external or _is_published(config) else _checkpoint
    return make(config, folder, version, adapter)


def _is_published(config: Config) -> bool:
    """Return True if a version has the newest policy."""
    if not fixed.is_round(config.round.directory):
        return False
    updates = [int(path.name) for path in (config.round.directory / "learner" / "checkpoints").glob("[0-9]*")]
    archive = RoundArchive(config)
    try:
        version = archive.publisher.manifest(archive.newest_version())
    finally:
        archive.close()
    return version is not None and version.update >= max(updates, default=0)


def _convert(folder: Path, file: Path, dtype: str) -> None:
    log.info("Converting the policy to GGUF …")
    command = [sys.executable, "-P", "-m", "swarm_node.engine.llama.gguf_file", str(folder), str(file), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == REFUSED and done.stdout:
        raise EngineFailed(**json.loads(done.stdout))
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        if "No module named" in reason:
            raise ConfigInvalid("A GGUF file needs llama.cpp.", hint="pip install 'echo-swarm[llama]'")
        raise EngineFailed(f"The GGUF file could not be written: {reason or f'exit code {done.returncode}'}.")


def _version(config: Config, folder: Path, version: int, adapter: bool) -> int:
    archive = RoundArchive(config)
    try:
        version = version or archive.newest_version()
        if not version:
            raise NotFound(
                "No version is published yet.", hint="Wait until `swarm-coordinator status` shows version 1."
            )
        log.info("Writing version %d from its chunks …", version)
        update = archive.write_policy(version, folder)
    finally:
        archive.close()
    if update is None:
        raise NotFound(f"Version {version} was not published, or its files were deleted.")
    _fold(folder, version, adapter)
    return update


def _best(config: Config, folder: Path, _version: int, adapter: bool) -> int:
    version = find_best(config.round.directory)
    if version is None:
        raise NotFound(
            "No evaluation of a version is complete yet.", hint="Set eval.every, or name one with --version."
        )
    log.info("Copying version %d, which has the best evaluation …", version)
    shutil.copytree(config.round.directory / "best" / str(version), folder)
    about = json.loads((folder / FILE).read_text())
    _fold(folder, version, adapter)
    return int(about[0]["update"])


def _fold(folder: Path, version: int, adapter: bool) -> None:
    """Merge the adapter into its base, or keep the adapter alone."""
    if (folder / CONFIG).exists():
        from coordinator.model import adapter_files

        log.info("Writing the adapter alone …" if adapter else "Merging the adapter into its base …")
        (adapter_files.keep_adapter if adapter else adapter_files.merge)(folder)
    elif adapter:
        raise NotFound(f"Version {version} has no adapter: all its weights were published.")


def _checkpoint(config: Config, folder: Path, _version: int, adapter: bool) -> int:
    from transformers.utils.logging import disable_progress_bar

    from coordinator.learner import checkpoint
    from coordinator.learner.policy import TrainedPolicy
    from coordinator.learner.settings import train_settings

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    learner = config.round.directory / "learner"
    if adapter and not config.learner.lora_rank:
        raise NotFound("This round trains no adapter.", hint="learner.lora_rank is 0: export the whole policy.")
    held = folder.with_name("checkpoint")
    last = checkpoint.hold_newest(learner / "checkpoints", held)
    if last is None:
        raise NotFound(
            f"There is no checkpoint in {learner}.",
            hint="Wait until `swarm-coordinator status` shows version 1, or name a version with --version.",
        )
    log.info("Reading the learner's checkpoint after update %d; this may take minutes …", int(last.name))
    policy = TrainedPolicy(learner / "start", train_settings(config))
    policy.restore(last)
    shutil.rmtree(held)
    log.info("Writing the %s …", "adapter" if adapter else "policy")
    if adapter:
        policy.writer.save_adapter(folder, config.model.base_name)
        (folder / canary.FILE_NAME).unlink()
    else:
        policy.writer.save_hub(folder)
    return policy.update
