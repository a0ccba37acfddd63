"""`swarm-coordinator keys`: show and replace the keys of the trust metadata.

- The coordinator must be stopped, since two signers would use the same numbers; nodes continue until the timestamp
  expires.
- A prepared root waits in the round's folder until enough holders of root keys have signed it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.options import EXIT_CODES, ConfigFile, Settings
from coordinator.config import fixed, load
from protocol.errors import ConfigInvalid
from protocol.text.commands import lesson

if TYPE_CHECKING:
    from coordinator.publishing.signed_metadata import RoleKeys, SignedMetadata

app = typer.Typer(
    help="Show and replace the keys that sign the trust metadata.", no_args_is_help=True, add_completion=False
)

RootKeys = Annotated[
    list[Path],
    typer.Option(
        "--root-keys",
        default_factory=list,
        show_default=False,
        exists=True,
        help="Folder with root keys; repeatable.",
    ),
]


@app.command(
    epilog=lesson(
        "swarm-coordinator keys show round.toml",
        "keep root.pem in offline storage; `keys rotate` replaces lost or stolen keys.",
        EXIT_CODES,
    )
)
def show(config_file: ConfigFile, settings: Settings) -> None:
    """Show each role's keys, its threshold, and which keys are on this machine. Needs no key."""
    from coordinator.publishing.signed_metadata import ROLES, RoleKeys

    folder = load(config_file, settings).round.directory
    metadata, signers = _metadata(config_file, settings), RoleKeys(folder / "keys").all()
    root = metadata.root()
    typer.echo(f"root {root.version}, good until {root.expires:%Y-%m-%d}")
    for role in ROLES:
        entry = root.roles[role]
        names = ", ".join(
            f"{keyid[:8]}{'' if keyid in signers else ' (not on this machine)'}" for keyid in entry.keyids
        )
        typer.echo(f"{role}: {entry.threshold} of {len(entry.keyids)} must sign: {names}")
    ledger = metadata.ledger_public().hex()
    has_ledger_key = any(signer.public_key.keyval["public"] == ledger for signer in signers.values())
    typer.echo(f"ledger: {ledger[:16]}…{'' if has_ledger_key else ' (not on this machine)'}")


@app.command(
    epilog=lesson(
        "swarm-coordinator keys rotate timestamp round.toml --root-keys /media/stick",
        "`launch` again; if signatures are missing, first `keys sign` and `keys install`.",
        EXIT_CODES,
    )
)
def rotate(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="root, targets, snapshot, timestamp or ledger.")],
    config_file: ConfigFile,
    settings: Settings,
    root_keys: RootKeys,
    keys: Annotated[int, typer.Option(min=1, max=16, help="Number of new keys for the role.")] = 1,
    threshold: Annotated[int, typer.Option(min=1, max=16, help="Number of these keys that must sign.")] = 1,
) -> None:
    """Replace the keys of a role. Needs enough root keys, on this machine or added later with `keys sign`."""
    from coordinator.publishing import rotation
    from coordinator.publishing.rotation import PENDING
    from coordinator.publishing.signed_metadata import LEDGER, ROLES, RoleKeys, utc_now
    from coordinator.service.opening import only_coordinator

    if role not in (*ROLES, LEDGER):
        raise ConfigInvalid(f"There is no role {role}.", hint=f"Roles: {', '.join((*ROLES, LEDGER))}.")
    metadata, folder = _metadata(config_file, settings), load(config_file, settings).round.directory
    with only_coordinator(folder):
        if (folder / PENDING).exists():
            raise ConfigInvalid(f"{PENDING} exists already.", hint="Install it with `keys install`, or remove it.")
        made = RoleKeys(folder / "keys", root_keys)
        data = rotation.prepare(metadata, made, role, keys, threshold, utc_now())
        _finish(metadata, made, folder, data)


@app.command(
    epilog=lesson(
        "swarm-coordinator keys sign pending.root.json --root-keys /media/stick",
        "copy the file back to the round's folder; run `keys install` there.",
        EXIT_CODES,
    )
)
def sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, help="A copy of pending.root.json.")],
    root_keys: RootKeys,
) -> None:
    """Sign a prepared root with root keys from a folder, on any machine. Needs no other file of the round."""
    from coordinator.base.files import write_durably
    from coordinator.publishing import rotation

    data, signatures = file.read_bytes(), 0
    for folder in root_keys:
        data, added = rotation.add_signatures(data, folder)
        signatures += added
    if not signatures:
        raise ConfigInvalid("No root key was found for signing.", hint="Give a folder with --root-keys.")
    write_durably(file, data, public=True)
    typer.echo(f"{signatures} signatures added. Copy {file} back to the coordinator.")


@app.command(
    epilog=lesson(
        "swarm-coordinator keys install round.toml",
        "`launch` again; nodes accept the new root automatically.",
        EXIT_CODES,
    )
)
def install(config_file: ConfigFile, settings: Settings) -> None:
    """Publish a prepared root that has enough signatures. Needs the keys of targets, snapshot and timestamp."""
    from coordinator.publishing.rotation import PENDING
    from coordinator.publishing.signed_metadata import RoleKeys
    from coordinator.service.opening import only_coordinator

    metadata, folder = _metadata(config_file, settings), load(config_file, settings).round.directory
    if not (folder / PENDING).exists():
        raise ConfigInvalid(f"There is no {PENDING} in {folder}.", hint="Run `keys rotate` first.")
    with only_coordinator(folder):
        _finish(metadata, RoleKeys(folder / "keys"), folder, (folder / PENDING).read_bytes())


def _finish(metadata: "SignedMetadata", keys: "RoleKeys", folder: Path, data: bytes) -> None:
    """Install a root that has enough signatures, or keep it until it has."""
    from coordinator.base.files import write_durably
    from coordinator.publishing import rotation
    from coordinator.publishing.rotation import PENDING
    from coordinator.publishing.signed_metadata import utc_now

    if missing := rotation.missing_signatures(metadata, data):
        write_durably(folder / PENDING, data)
        typer.echo(
            f"{missing} signatures of root keys are missing. Other holders must run `keys sign` on a copy of "
            f"{folder / PENDING}, put it back, and run `keys install`."
        )
        return
    rotation.install(metadata, keys, data, utc_now())
    (folder / PENDING).unlink(missing_ok=True)
    typer.echo(f"root {metadata.root().version} is published; keep its root keys in offline storage.")


def _metadata(config_file: Path, settings: list[str]) -> "SignedMetadata":
    from coordinator.publishing.signed_metadata import SignedMetadata

    config = load(config_file, settings)
    folder = config.round.directory
    if not (folder / "metadata" / "timestamp.json").exists():
        raise fixed.no_round(folder)
    return SignedMetadata(folder / "keys", folder / "metadata", config.publish.timestamp_lifetime_s)
