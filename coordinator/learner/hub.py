"""Upload of an exported policy to the model hub, and its card with the round's evidence.

- The whole card is read from the round's store and settings; readers can verify it with the round's ledger.
- The digest of a version's manifest is given only if the folder's weights are those files, byte for byte.
- huggingface_hub uploads with its own token; this module reads and keeps no token.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.audit.case import RoundArchive
from coordinator.base.files import mapped
from coordinator.config import Config
from coordinator.config.round import HUB
from coordinator.learner.settings import algorithm
from coordinator.store.facts import PROGRESS, ROUND_ID, get_fact
from coordinator.store.tables import rollouts, versions
from coordinator.transactions import evaluations
from ledger import store
from protocol.errors import ConfigInvalid, NotAuthorised, Unreachable
from protocol.policy.chunks import digest
from protocol.policy.manifest import PolicyManifest
from protocol.text.plain import counted

FILE = "README.md"


def write_card(config: Config, folder: Path, update: int) -> None:
    """Write the card of a policy at this update into its folder."""
    archive = RoundArchive(config)
    try:
        seen = archive.read(_seen, update)
        of = archive.publisher.manifest(seen["version"]) if seen["version"] else None
    finally:
        archive.close()
    (folder / FILE).write_text("\n".join(_lines(config, folder, update, seen, of)) + "\n")


def push(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload the folder as one commit; create the repository if there is none; return the commit's address."""
    from huggingface_hub import HfApi, errors

    again = f"The folder is complete: try again with `hf upload {repository} {folder}`."
    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        made = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except errors.HFValidationError as error:
        raise ConfigInvalid(f"{repository} is not a repository name: {_reason(error)}") from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            hint = f"Run `hf auth login`, or set HF_TOKEN, with a token that has write access. {again}"
            raise NotAuthorised(f"This token has no write access to {repository} on the hub.", hint=hint) from error
        raise Unreachable(f"The hub refused the upload: {_reason(error)}", hint=again) from error
    except (_client_error(), errors.OfflineModeIsEnabled, OSError, RuntimeError) as error:
        raise Unreachable(f"The hub could not be reached: {_reason(error)}", hint=again) from error
    return str(made.commit_url)


def _client_error() -> type[Exception]:
    """Return the base class of the errors of the hub's HTTP client, whichever client its version uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _seen(connection: sa.Connection, update: int) -> dict[str, Any]:
    """Return the facts of the round that the card shows."""
    at = sa.select(versions.c.version, versions.c.manifest_digest).where(versions.c.policy_update == update)
    row = connection.execute(at.order_by(versions.c.version.desc()).limit(1)).first()
    trained = sa.select(sa.func.count(), sa.func.count(rollouts.c.node_id.distinct()))
    groups, nodes = connection.execute(trained.where(rollouts.c.batch <= update)).one()
    progress = get_fact(connection, PROGRESS)
    return {
        "round": get_fact(connection, ROUND_ID),
        "version": row.version if row else 0,
        "manifest": row.manifest_digest if row else "",
        "checkpoint": store.checkpoint(connection),
        "entries": store.size(connection),
        "groups": groups,
        "nodes": nodes,
        "accuracy": (progress.get("accuracy_before"), progress.get("accuracy_after")),
        "evaluations": [row for row in evaluations.list_evaluations(connection) if row["result"]],
    }


def _lines(
    config: Config, folder: Path, update: int, seen: Mapping[str, Any], manifest: PolicyManifest | None
) -> Iterator[str]:
    yield from _head(config)
    yield "# A policy trained in a swarm\n"
    yield (
        f"The policy after {update} updates of reinforcement learning with Echo Swarm "
        f"{metadata.version('echo-swarm')}. {counted(seen['nodes'], 'node')} sampled the "
        f"{counted(seen['groups'], 'group')} of {config.sampling.samples_per_group} completions for it.\n"
    )
    yield "## Evidence\n"
    yield from _table(("what", "value"), _evidence(folder, update, seen, manifest))
    if note := seen["checkpoint"]:
        yield "\nThe ledger's last signed checkpoint when this was exported:\n"
        yield f"```\n{note.decode().rstrip()}\n```"
    yield "\n## Held-out problems\n"
    yield from _measured(seen)
    yield "\n## Settings\n"
    yield from _table(("setting", "value"), _settings(config))


def _head(config: Config) -> Iterator[str]:
    """Yield the metadata that the hub reads."""
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    if config.model.path.startswith(HUB):
        yield f"base_model: {json.dumps(config.model.base_name)}"
    yield "tags:\n- reinforcement-learning\n- grpo\n- echo-swarm"
    yield "---\n"


def _evidence(
    folder: Path, update: int, seen: Mapping[str, Any], manifest: PolicyManifest | None
) -> Iterator[tuple[str, object]]:
    yield "round", seen["round"]
    yield "update", update
    if manifest is not None and _is_published(folder, manifest):
        yield "policy version", f"{seen['version']}, byte for byte"
        yield "its manifest", f"`{seen['manifest']}` (BLAKE3)"
    elif seen["version"]:
        yield "policy version", f"same update as version {seen['version']}, in other files than the published ones"
    else:
        yield "policy version", "none was published at this update"
    yield "ledger", f"{seen['entries']} entries"


def _is_published(folder: Path, manifest: PolicyManifest) -> bool:
    """Return True if the folder has exactly the weight files of the manifest."""
    wanted = {entry.path: entry.digest for entry in manifest.files if entry.path.endswith(".safetensors")}
    digests = {path.name: digest(mapped(path)) for path in folder.glob("*.safetensors")}
    return bool(wanted) and wanted == digests


def _measured(seen: Mapping[str, Any]) -> Iterator[str]:
    before, after = seen["accuracy"]
    if before is not None:
        later = "not measured yet" if after is None else f"{after:.1%}"
        yield f"The learner's own measurement: {before:.1%} right before the first update, {later} at the end.\n"
    if not seen["evaluations"]:
        yield "No version was measured by nodes." if before is not None else "Nothing was measured."
        return
    rows = (
        (row["split"], row["version"], row["update"], row["result"]["samples"], f"{row['result']['average']:.4f}")
        for row in seen["evaluations"]
    )
    yield from _table(("split", "version", "update", "samples", "average reward"), rows)


def _settings(config: Config) -> Iterator[tuple[str, object]]:
    chosen = asdict(algorithm(config))
    correction = chosen.pop("correction")
    yield "algorithm", config.learner.algorithm
    yield "learning rate", config.learner.learning_rate
    yield "groups per update", config.learner.groups_per_update
    yield "lora_rank", config.learner.lora_rank or "0, all weights"
    yield "temperature", config.sampling.temperature
    yield "staleness.max_updates", config.staleness.max_updates
    yield from ((f"objective.{name}", value) for name, value in chosen.items())
    yield from ((f"correction.{name}", value) for name, value in correction.items())


def _table(head: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(value).replace('|', '/') for value in row)} |"
