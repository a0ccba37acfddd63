"""`swarm-coordinator policy`: list and verify published versions, and replace the newest one.

- `list`, `show` and `verify` only read, from the round's folder and store: a running coordinator is not disturbed.
- `rollback` and `publish` send an order to a running coordinator; for a stopped round they act as its coordinator.
"""

import asyncio
import json
import shutil
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import Config, fixed, load
from protocol.errors import ConfigInvalid, OutOfOrder
from protocol.text.commands import lesson
from protocol.text.plain import counted, size_text

if TYPE_CHECKING:
    from coordinator.publishing.verifying import Verification

app = typer.Typer(
    help="List, verify and replace published versions.",
    no_args_is_help=True,
    add_completion=False,
)

DIFFERS = 3

PUBLICATION_S = 3600.0
"""Longest wait for a publication: cutting, hashing and syncing the largest policies."""

Version = Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of the version.")]
Reason = Annotated[str, typer.Option(help="Reason; it is recorded with the order.")]
Last = Annotated[int, typer.Option(min=0, help="Number of versions; 0: all.")]


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator policy list round.toml --last 5",
        "`policy show` with a number; `export` writes one as a folder.",
        EXIT_CODES,
    ),
)
def list_(config_file: ConfigFile, settings: Settings, last: Last = 20, as_json: AsJson = False) -> None:
    """List the published versions, the newest first.

    Each line has the number, update, time, size, the bytes that a node with the version before fetches, whether it
    is kept, and how long its broadcast took (of the last five versions).
    """
    from coordinator.audit.case import RoundArchive
    from coordinator.commands.asking import launch_command, stopped_line
    from coordinator.reports import versions
    from coordinator.service.opening import led_until_ms

    config = load(config_file, settings)
    with closing(RoundArchive(config)) as archive:
        rows = archive.read(versions.listed, archive.publisher, archive.metadata, last=last)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(_line(row))
    if not rows:
        typer.echo("No version is published yet.")
    if since_ms := led_until_ms(config.round.directory):
        typer.echo(stopped_line(config, launch_command(config_file, settings), since_ms))


@app.command(
    epilog=lesson(
        "swarm-coordinator policy show round.toml 7",
        "`policy verify` checks that the kept files match the signatures.",
        EXIT_CODES,
    )
)
def show(config_file: ConfigFile, version: Version, settings: Settings, as_json: AsJson = False) -> None:
    """Show one version: its manifest, its files with digests, and the keys that signed the metadata."""
    from coordinator.audit.case import RoundArchive
    from coordinator.reports import versions

    with closing(RoundArchive(load(config_file, settings))) as archive:
        row = archive.read(versions.version_report, archive.publisher, archive.metadata, version=version)
    if as_json:
        typer.echo(json.dumps(row, indent=2))
        return
    typer.echo(f"{_line(row)}\nmanifest {row['manifest_digest']}")
    if row["task"] is None:
        typer.echo("Its manifest is missing or damaged: run `swarm-coordinator policy verify` for details.")
    else:
        typer.echo(f"parent   {row['parent'] or 'none: it is the first'}")
        drawn = row["sampler"]
        typer.echo(f"task     {row['task']}, temperature {drawn['temperature']}, {drawn['max_new_tokens']} new tokens")
    for file in row["files"]:
        after, patches = file["patches_after_anchor"], file["patches"]
        chain = (
            f", {len(patches)} patches of {size_text(sum(patches))}, {after} of them after the anchor"
            if patches
            else ""
        )
        typer.echo(
            f"{file['digest']}  {file['path']}, {size_text(file['size_bytes'])}, chunks: {file['chunks']}{chain}"
        )
    listed = "is" if row["signed"] else "is no more"
    typer.echo(f"The version {listed} in the signed list. The current metadata is signed by:")
    for role, signed in row["signers"].items():
        keys = ", ".join(key[:16] for key in signed["keys"]) or "nobody"
        typer.echo(f"{role:9} {keys} ({signed['threshold']} must)")


@app.command(
    epilog=lesson(
        "swarm-coordinator policy verify round.toml 7",
        "if anything differs, `restore` a backup, and do not roll back to this version.",
        f"{EXIT_CODES[:-1]}, {DIFFERS} something differs from what was signed.",
    )
)
def verify(
    config_file: ConfigFile,
    settings: Settings,
    version: Version,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a version: rebuild it from its chunks, and compare all digests and the trust metadata.

    It checks the trust metadata from the first root on, as a node would, then every chunk, patch and file.
    """
    from coordinator.audit.case import RoundArchive
    from coordinator.publishing.verifying import Verification
    from coordinator.reports import versions

    with closing(RoundArchive(load(config_file, settings))) as archive:
        digest = archive.read(versions.recorded, version)
        run = Verification(
            version, recorded=digest, metadata=archive.metadata, publisher=archive.publisher, now=datetime.now(UTC)
        )
        differences = run.documents()
        if run.manifest is not None:
            differences += _content(run, version, quiet=quiet or as_json)
    if as_json:
        typer.echo(json.dumps({"version": version, "manifest_digest": digest, "differences": differences}, indent=2))
    else:
        for line in differences:
            typer.echo(line)
        typer.echo(_verdict(run, version, len(differences)))
    if differences:
        raise typer.Exit(DIFFERS)


@app.command(
    epilog=lesson(
        "swarm-coordinator policy rollback round.toml 7 --reason 'version 8 rambles'",
        "`status` shows it spread as the next version; `eval run` measures it.",
        EXIT_CODES,
    )
)
def rollback(
    config_file: ConfigFile, version: Version, settings: Settings, reason: Reason, as_json: AsJson = False
) -> None:
    """Publish an older version's weights as the next version; the learner continues from them.

    Numbers only increase, and no node loses credit: claims of the replaced versions count as long as their staleness
    allows. The learner's optimizer state is reset.
    """
    _replace(load(config_file, settings), {"action": "rollback", "version": version, "reason": reason}, as_json)


@app.command(
    epilog=lesson(
        "swarm-coordinator policy publish round.toml policy --reason 'tuned by hand'",
        "`status` shows it spread; `eval run` measures it.",
        EXIT_CODES,
    )
)
def publish(
    config_file: ConfigFile,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder with other weights of this policy, or another adapter for its base."
        ),
    ],
    settings: Settings,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Publish the weights of a folder as the next version; the learner continues from them.

    Architecture, configuration and tokenizer must be those of the round's policy. If the versions are adapters of a
    base, the folder must be an adapter of the same rank, as `export --adapter` writes it. Needs torch and the round's
    folder.
    """
    from coordinator.audit.case import RoundArchive
    from coordinator.base.files import make_folder
    from coordinator.service import publication

    config = load(config_file, settings)
    ran = fixed.load_resolved(config.round.directory)
    if not folder.is_dir():
        raise ConfigInvalid(f"There is no folder {folder}.", hint="`swarm-coordinator export` writes one.")
    uploads = make_folder(config.round.directory / "uploads")
    name = publication.stage_name()
    archive = RoundArchive(ran)
    with TemporaryDirectory(prefix=f"{name}.", dir=uploads) as scratch, closing(archive):
        newest, _ = archive.read(publication.where_it_stands)
        current = Path(scratch) / "current"
        if archive.write_policy(newest, current) is None:
            raise OutOfOrder("No version is published yet.", hint=publication.NO_VERSION_YET)
        from coordinator.learner import offering

        offering.prepare(folder, current, Path(scratch) / name)
        (Path(scratch) / name).rename(uploads / name)
    try:
        _replace(config, {"action": "publish", "stage": name, "reason": reason}, as_json)
    finally:
        shutil.rmtree(uploads / name, ignore_errors=True)


def _replace(config: Config, wanted: dict[str, Any], as_json: bool) -> None:
    """Send the order, or carry it out if no coordinator runs; print the result."""
    from coordinator.commands.asking import ask, launched
    from coordinator.service.publication import Replacement
    from coordinator.transactions.orders import whoami

    order = Replacement(**wanted, given_by=whoami())
    done = ask(config, "POST", "/v1/operator/versions", order.model_dump(), patience_s=PUBLICATION_S)
    is_stopped = done is None
    if is_stopped:
        from coordinator.service.round import Round

        with closing(Round(launched(config))) as round_:
            round_.publication.mirror = None  # a running coordinator updates the mirror later
            done = asyncio.run(round_.publication.replace(order))
    if as_json:
        typer.echo(json.dumps(done))
    elif not done["changed"]:
        typer.echo(f"Version {done['version']} has these weights already. Nothing was published.")
    else:
        later = "; nodes receive it when the round is launched" if is_stopped else ""
        typer.echo(f"Version {done['version']} is published{later}. The learner continues from it.")


def _content(run: "Verification", version: int, *, quiet: bool) -> list[str]:
    """Return the differences in chunks and files; show a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"version {version}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("", total=run.total_bytes)
        return run.content(lambda size_bytes: bar.advance(task, size_bytes))


def _verdict(run: "Verification", version: int, differences: int) -> str:
    if differences or run.manifest is None:
        return f"Version {version} differs from what was signed: {counted(differences, 'difference')}."
    manifest = run.manifest
    size_bytes = sum(entry.size_bytes for entry in manifest.files)
    files, chunks = len(manifest.files), len(manifest.chunk_sizes())
    made = f"{counted(files, 'file')} of {size_text(size_bytes)} from {counted(chunks, 'chunk')}"
    return f"Version {version} is complete: {made}, every digest as signed."


def _line(row: dict[str, Any]) -> str:
    """Return a version in one line."""
    when = datetime.fromtimestamp(row["published_ms"] / 1000, UTC)
    sizes = [size_text(row["size_bytes"])]
    if row["patch_bytes"] is not None:
        sizes.append(f"{size_text(row['patch_bytes'])} from the one before")
    if row["adapter_bytes"] is not None:
        sizes.append(f"adapter {size_text(row['adapter_bytes'])}")
    kept = "kept" if row["kept"] else "gone"
    made = f"version {row['version']}, update {row['update']}, {when:%Y-%m-%d %H:%M:%S}"
    return f"{made}, {', '.join(sizes)}, {kept}, {_spread(row['broadcast'])}"


def _spread(broadcast: dict[str, Any] | None) -> str:
    """Return T_bcast, for versions whose broadcast is still recorded."""
    if broadcast is None:
        return "T_bcast not known"
    reached = f"{broadcast['reached']} of {counted(broadcast['nodes'], 'node')}"
    return f"T_bcast {broadcast['median_s']:.1f} s median, {broadcast['max_s']:.1f} s to the last of {reached}"
