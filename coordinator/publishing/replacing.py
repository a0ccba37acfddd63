"""Weights that the operator puts in the place of the learner's: an older version again, or those of another folder.

    staged → checked → intended → signed → entered

- Numbers only go forward: they become the next version, at the update that the newest batch leads to. So every claim,
  on the version that was left as well, stands under the same rule of staleness as before.
- The learner goes on from them as soon as it sees that there is a replacement it has not taken. Until then it may
  finish an update whose weights nobody will have.
- What is intended is stored before anything is signed, and a kill in between is settled before the next version gets
  its number: what nodes could have seen is entered, with the order; anything else has not happened.
- The same weights as the newest version's are a named outcome, not a version: so an order can be repeated.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from blake3 import blake3
from pydantic import Field

from coordinator import orders
from coordinator.config.section import Section
from coordinator.publishing import weights
from coordinator.store.state import get_fact, set_fact
from coordinator.transactions import policy_versions
from coordinator.work.leases import latest_batch
from protocol import limits
from protocol.errors import ConfigInvalid, NotFound, OutOfOrder
from protocol.learning import Publication, Upload
from protocol.manifest import target_path

if TYPE_CHECKING:
    from coordinator.publishing.publish import Publisher
    from coordinator.round import Round

log = logging.getLogger(__name__)

ORDERED, REPLACED = "ordered_version", "replaced_version"

STAGE = r"ordered-[0-9a-f]{16}"
"""How a folder below `uploads/` is called that is to be published by order."""

LOOK = "`swarm-coordinator policy list` shows which versions are kept; `publish.keep` keeps more of them."

NO_VERSION_YET = (
    "Wait until `swarm-coordinator status` shows version 1 and give the order again; or begin a new round from these "
    "weights, with model.path set to their folder and another round.directory."
)


class Replacement(Section):
    """What shall come in place of the newest version, why, and by whose order."""

    action: Literal["rollback", "publish"]
    version: int = Field(0, ge=0, le=limits.VERSION_MAX)
    stage: str = Field("", pattern=rf"^({STAGE})?$")
    reason: str = Field(min_length=1, max_length=orders.REASON_MAX_CHARS)
    given_by: str = Field(min_length=1, max_length=100)


async def replace(here: "Round", wanted: Replacement) -> dict[str, Any]:
    """Publish what is wanted as the next version; which one that is, and whether anything changed."""
    stage = here.publisher.uploads / (wanted.stage or "ordered-rollback")
    async with here.publishing:
        try:
            await settle(here)
            newest, update = await here.database.run(_where_it_stands)
            await asyncio.to_thread(_stage, here, wanted, stage, newest)
            files = await asyncio.to_thread(_described, stage)
            before = await asyncio.to_thread(here.publisher.manifest, newest)
            if before and {(entry.path, entry.digest) for entry in before.files} == {(f.path, f.digest) for f in files}:
                return {"version": newest, "changed": False}
            await here.database.run(set_fact, ORDERED, wanted.model_dump() | {"becomes": newest + 1})
            await asyncio.to_thread(_move, stage, here.publisher.uploads / str(newest + 1))
            await here.bring_out(Publication(version=newest + 1, update=update, files=files))
        finally:
            await asyncio.to_thread(shutil.rmtree, stage, ignore_errors=True)
    return {"version": newest + 1, "changed": True}


async def settle(here: "Round") -> None:
    """What a kill has left of the next version: entered if it is signed, whoever made it; else it has not happened."""
    version = 1 + (await here.database.read(policy_versions.newest_version))[0]
    manifest = here.publisher.manifest(version) if target_path(version) in here.metadata.targets() else None
    if manifest:
        await here.enter(manifest)
    elif await here.database.read(get_fact, ORDERED):
        await here.database.run(set_fact, ORDERED, None)
        log.warning("what was ordered about versions was not done when the coordinator ended: order it again")


def entered(connection: sa.Connection, version: int, now_ms: int) -> None:
    """If this version was ordered, the order is carried out: to be called in the transaction that enters it."""
    ordered = get_fact(connection, ORDERED)
    if not ordered or ordered["becomes"] != version:
        return
    set_fact(connection, ORDERED, None)
    set_fact(connection, REPLACED, version)
    what = f"version {ordered['version']} again: " if ordered["action"] == "rollback" else ""
    orders.record(
        connection,
        ordered["action"],
        f"version {version}",
        f"{what}{ordered['reason']}"[: orders.REASON_MAX_CHARS],
        given_by=ordered["given_by"],
        now_ms=now_ms,
    )


def newest_replacement(connection: sa.Connection) -> int:
    """The last version that came by order; 0 if none did."""
    return int(get_fact(connection, REPLACED, 0))


def file_of(publisher: "Publisher", version: int, name: str, digest: str) -> Path:
    """A whole file of a version: as it was uploaded, or made from its chunks again."""
    path = publisher.uploads / str(version) / name
    if not path.is_file() or _digest(path) != digest:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{name}.again")
        beside.write_bytes(publisher.read_file(version, name))
        beside.replace(path)
    return path


def _where_it_stands(connection: sa.Connection) -> tuple[int, int]:
    """The newest version, and the update that the next one stands at."""
    if get_fact(connection, "finished", False):
        raise OutOfOrder(
            "The round is finished: nothing is sampled from it any more.",
            hint="`swarm-coordinator export --version` writes out an older policy.",
        )
    newest, update = policy_versions.newest_version(connection)
    if not newest:
        raise OutOfOrder("No version is published yet.", hint=NO_VERSION_YET)
    return newest, max(update, latest_batch(connection))


def _stage(here: "Round", wanted: Replacement, stage: Path, newest: int) -> None:
    """Have the files there, all of them and sound, or refuse."""
    settings = here.config.learner
    if settings.lora_rank and not settings.publish_adapters:
        raise ConfigInvalid(
            "This round's learner trains adapters and publishes merged weights: it cannot go on from a version.",
            hint="With learner.publish_adapters=true it can.",
        )
    if wanted.action == "rollback":
        if not 1 <= wanted.version <= newest:
            raise NotFound(f"Version {wanted.version} was not published.", hint=LOOK)
        shutil.rmtree(stage, ignore_errors=True)
        if here.publisher.write_folder(wanted.version, stage) is None:
            raise NotFound(f"Version {wanted.version} is not kept any more.", hint=LOOK)
    elif not wanted.stage or not stage.is_dir():
        raise NotFound("The staged folder is gone.", hint="Give the order again.")
    manifest = here.publisher.manifest(newest)
    names, wanted_names = (
        {path.name for path in stage.iterdir()},
        {entry.path for entry in manifest.files} if manifest else set(),
    )
    if names != wanted_names:
        differ = ", ".join(sorted(names ^ wanted_names))
        raise ConfigInvalid(f"Not the files that this round's versions have: {differ[:300]}.")
    weights.require_finite(weights.of(stage))


def _described(stage: Path) -> tuple[Upload, ...]:
    return tuple(Upload(path=path.name, digest=_digest(path)) for path in sorted(stage.iterdir()))


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _move(stage: Path, target: Path) -> None:
    """File by file: a learner that is uploading its own version of this number is overruled, and not disturbed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in stage.iterdir():
        path.replace(target / path.name)


def stage_name() -> str:
    """A name that no other order has."""
    return f"ordered-{os.urandom(8).hex()}"
