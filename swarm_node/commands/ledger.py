"""`swarm-node ledger`: verify the coordinator's ledger, save the proofs, and act as a witness.

- No command needs to trust the coordinator or a running agent; receipts and forks are checked without a network.
- The join string of a round gives the address of its files, and the root that they must lead back to.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protocol.errors import CheckpointInvalid, ConfigInvalid, ProofInvalid, SwarmError
from protocol.text.commands import lesson
from protocol.text.money import Unit, parse_unit
from protocol.text.plain import counted
from swarm_node.base import disk
from swarm_node.commands.options import DEFAULT_HOME, HomeOfRound, JoinText, WholeSentences

if TYPE_CHECKING:
    from ledger.note import NoteKey
    from ledger.payout_proof import PayoutLine
    from ledger.training import TrainingSummary
    from ledger.witness import Witnesses
    from swarm_node.coordinator_api.join_string import JoinString
    from swarm_node.coordinator_api.origin import Origin
    from swarm_node.ledger.log_reader import PublicFiles
    from swarm_node.ledger.log_verify import Verified
    from swarm_node.ledger.witnessing import WitnessRecord, WitnessServer

app = typer.Typer(
    cls=WholeSentences,
    help="Verify the ledger, save proofs, act as a witness.",
    no_args_is_help=True,
    add_completion=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")]
WitnessKeys = Annotated[
    list[str],
    typer.Option(
        "--witness",
        default_factory=list,
        show_default=False,
        help="Public key of a witness; repeatable. See `ledger witness`.",
    ),
]
Quorum = Annotated[int | None, typer.Option(min=0, help="Number of witnesses that must have signed; by default all.")]
RENEW_KEYS_S = 600.0
"""Time between two reads of a round's root documents: until then, notes under a new key are refused."""

EXIT_CODES = "Exit codes: 0 verified, 1 not verified, 2 wrong usage."


@app.command(
    epilog=lesson(
        "swarm-node ledger verify --save ledger-files",
        "`ledger receipts` saves the proofs of your own credit.",
        EXIT_CODES,
    )
)
def verify(
    join_string: JoinText = "",
    *,
    keys: WitnessKeys,
    folder: Annotated[
        Path | None, typer.Option("--from", help="Verify files that were saved with --save, offline.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the files to this folder for --from.")] = None,
    quorum: Quorum = None,
    home: HomeOfRound = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Verify the ledger from its public files: the tree, the balances and the leaderboard.

    No account, key or agent is needed. Exit code 1: something differs. --save writes the files to a folder;
    --from reads them again without a network. Without a join string all rounds are verified that the node joined last.
    """
    import trio

    from swarm_node.commands.targets import for_each_round, the_only
    from swarm_node.coordinator_api import last_round

    witnesses = witnesses_of(keys, quorum)
    joins = last_round.all_chosen(join_string, home)
    if folder or save:
        the_only(joins, "a folder of files")
    if folder and not (folder / "ledger" / "checkpoint").is_file():
        raise ConfigInvalid(f"{folder} has no saved ledger.", hint="`ledger verify --save FOLDER` saves one.")

    def show(join: "JoinString") -> None:
        result = trio.run(_verify, join, folder, save, witnesses, not as_json)
        if as_json:
            typer.echo(json.dumps({"url": join.url} | asdict(result)))
        else:
            _show_verified(result, join, witnesses)

    for_each_round(joins, show, headed=not as_json)


def _show_verified(result: "Verified", join: "JoinString", witnesses: "Witnesses") -> None:
    """Print what a verified log says."""
    owed = sum(micros for name, micros in result.balances.items() if name.startswith(("payable:", "paying:")))
    paid = sum(micros for name, micros in result.balances.items() if name.startswith("paid:"))
    unit = parse_unit(result.unit)
    typer.echo(
        f"Verified: {counted(result.entries, 'entry', 'entries')} of {join.url}, signed root {result.root[:16]}…. "
        f"Owed: {unit.exact(owed)}, paid: {unit.exact(paid)}; the leaderboard matches the ledger "
        f"({counted(result.nodes, 'node')})."
    )
    pardoned = f", except {counted(result.audits.pardoned, 'pardoned claim')}" if result.audits.pardoned else ""
    typer.echo(
        f"The lottery sampled {result.audits.drawn:,} of {result.audits.claims:,} claims. "
        f"All sampled claims were audited before payment{pardoned}."
    )
    for line in _training_lines(result.training):
        typer.echo(line)
    if not result.logged_roots:
        typer.echo("Note: this old ledger has no root documents. It cannot prove that all nodes see the same keys.")
    for gap in result.gaps:
        typer.echo(f"Note: {gap}. Receipts of lost entries still prove what was published.")
    if witnesses.quorum:
        typer.echo(
            f"{witnesses.quorum} of {len(witnesses.keys)} witnesses signed the first {result.witnessed} entries."
        )


@app.command(
    epilog=lesson(
        "swarm-node ledger receipts",
        "anyone can check these files with `ledger check`, without a network.",
        EXIT_CODES,
    )
)
def receipts(
    join_string: JoinText = "",
    home: Annotated[Path, typer.Option(help="The node's folder; receipts are saved in it.")] = DEFAULT_HOME,
    offline: Annotated[bool, typer.Option("--offline", help="Check the saved ones only, without a network.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch and check a receipt for every accepted rollout of this node; receipts prove its credit permanently.

    They are fetched many at a time, and kept in one file per thousand claims; what is kept is not fetched again.
    """
    import trio

    from swarm_node.commands.targets import for_each_round
    from swarm_node.coordinator_api import last_round
    from swarm_node.coordinator_api.join_string import round_folder

    def show(join: "JoinString") -> None:
        kept, missing, unit = trio.run(_receipts, join, home, offline, not as_json)
        if as_json:
            typer.echo(json.dumps({"url": join.url, "receipts": kept, "missing": missing}))
            return
        for state in ("posted", "reinstated", "pending", "voided"):
            amounts = [int(row["amount_micros"]) for row in kept if row["state"] == state]
            if state == "reinstated" and not amounts:
                continue  # almost always the case
            typer.echo(f"{state}: {counted(len(amounts), 'claim')}, {unit.exact(sum(amounts))}, verified")
        typer.echo(f"no receipt {'saved' if offline else 'published'} yet: {counted(len(missing), 'claim')}")
        if kept:
            saved = round_folder(home, join) / "receipts"
            typer.echo(f"saved in {saved}; `swarm-node ledger check FILE` verifies each file without a network")

    for_each_round(last_round.all_chosen(join_string, home), show, headed=not as_json)


@app.command(
    epilog=lesson(
        "swarm-node ledger payouts",
        "anyone can check these files with `ledger check`; an EVM payout contract accepts the proof.",
        EXIT_CODES,
    )
)
def payouts(
    join_string: JoinText = "",
    home: Annotated[Path, typer.Option(help="The node's folder; proofs are saved in it.")] = DEFAULT_HOME,
    offline: Annotated[bool, typer.Option("--offline", help="Check the saved ones only, without a network.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch and check the payouts of this node's owner in each batch, with the proof that they are in the log."""
    import trio

    from protocol.text.plain import one_line
    from swarm_node.commands.proof_file import payout_row
    from swarm_node.commands.targets import for_each_round
    from swarm_node.coordinator_api import last_round

    def show(join: "JoinString") -> None:
        lines, unit = trio.run(_payouts, join, home, offline)
        if as_json:
            rows = [payout_row(join.round_id, line) for _, line in lines if line]
            missing = [number for number, line in lines if line is None]
            typer.echo(json.dumps({"url": join.url, "payouts": rows, "missing": missing}))
            return
        for number, line in lines:
            if line is None:
                typer.echo(f"batch {number}: not published yet")
                continue
            how = f"paid, reference {line.paid.reference}" if line.paid else line.state
            where = one_line(line.address)
            typer.echo(f"batch {number}: {unit.exact(line.amount_micros)} to {where}, verified; {how}")
        if not lines:
            typer.echo("no payout batch includes this node's owner")

    for_each_round(last_round.all_chosen(join_string, home), show, headed=not as_json)


@app.command(
    epilog=lesson(
        "swarm-node ledger check RECEIPT",
        "if it proves a fork, publish it: an honest coordinator never signs two histories.",
        EXIT_CODES,
    )
)
def check(
    join_string: JoinText = "",
    file: Annotated[str, typer.Argument(metavar="FILE", help="A receipt, or a proof of a payout or a fork.")] = "",
    home: HomeOfRound = DEFAULT_HOME,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was verified as JSON lines.")] = False,
) -> None:
    """Check a proof file without a network: of claims, a payout, or a fork of the ledger.

    Without a join string it may be of any round that the node joined last.
    """
    from swarm_node.commands.proof_file import prove
    from swarm_node.coordinator_api import last_round

    join_string, file = last_round.with_round(join_string, file)
    joins, data = last_round.all_chosen(join_string, home), _proof_bytes(file)
    failed: dict[str, SwarmError] = {}
    for join in joins:
        try:
            found = prove(data, join.round_id, file)
        except SwarmError as error:
            failed[join.url] = error
            continue
        typer.echo("\n".join(map(json.dumps, found.rows)) if as_json else found.said)
        return
    if len({error.message for error in failed.values()}) == 1:
        raise next(iter(failed.values()))
    reasons = "; ".join(f"{url}: {error.message.rstrip('.')}" for url, error in failed.items())
    raise ProofInvalid(f"{file} proves nothing about any of the {len(joins)} joined rounds: {reasons}.")


@app.command(
    epilog=lesson(
        "swarm-node ledger witness --name example.org/anna --submit",
        "run it every few minutes, and publish your key for `ledger verify --witness`.",
        EXIT_CODES,
    )
)
def witness(
    join_string: JoinText = "",
    *,
    log_keys: Annotated[
        list[str],
        typer.Option(
            "--log", default_factory=list, show_default=False, help="With --listen: key of a log; repeatable."
        ),
    ],
    home: Annotated[
        Path, typer.Option(help="Folder for the witness's key and the checkpoints it has seen.")
    ] = DEFAULT_HOME,
    name: Annotated[str, typer.Option(help="Name of the key, such as your domain.")] = "",
    submit: Annotated[
        bool, typer.Option("--submit", help="Send the signature to the coordinator, which publishes it.")
    ] = False,
    listen: Annotated[
        str, typer.Option(help="Serve C2SP's tlog-witness at this host:port; logs then send their checkpoints.")
    ] = "",
) -> None:
    """Sign the newest checkpoint, if it continues all checkpoints that this witness has seen; print the note.

    Run it regularly, and send the note to the coordinator, or publish it yourself. The witness's key, for
    `ledger verify --witness` and for the operator, is printed to standard error. With --listen the program does not
    end: it answers the round's coordinator and every log whose key is given with --log.
    """
    import trio

    from swarm_node.commands.targets import for_each_round
    from swarm_node.coordinator_api import last_round
    from swarm_node.ledger.witnessing import watch_folder

    if listen:
        _witness_logs(join_string, log_keys, _record_of(home, name), home, listen)
        return

    def sign(join: "JoinString") -> None:
        folder = watch_folder(home / "witness", join.round_id)
        with _alone(folder):
            record = _record_of(home, name)
            note = trio.run(_witness, join, record, folder)
            typer.echo(f"round: {join.url}\nwitness key: {record.key}", err=True)
            if submit:
                typer.echo(f"coordinator: {trio.run(_submit, join, note)}", err=True)
        typer.echo(note.decode(), nl=False)

    for_each_round(last_round.all_chosen(join_string, home), sign, headed=False)  # standard output has notes only


def _witness_logs(join_string: str, texts: list[str], record: "WitnessRecord", home: Path, listen: str) -> None:
    """Serve a witness for logs by their keys, and for a round; without a log's key, for the last one."""
    import trio

    from ledger.note import KeyKind, NoteKey
    from swarm_node.coordinator_api import last_round

    with _typed():
        logs = [NoteKey.parse(text) for text in texts]
    if any(key.kind is not KeyKind.LOG for key in logs):
        raise ConfigInvalid("--log takes keys of logs, not of witnesses.", hint="A log's key looks like name+id+A….")
    join = last_round.chosen(join_string, home) if join_string or not logs else None
    if join:
        logs += trio.run(_log_keys, join)[:1]
    typer.echo(f"witness key: {record.key}", err=True)
    trio.run(_serve_witness, record, logs, listen, join)


def _training_lines(training: "TrainingSummary") -> Iterator[str]:
    """Yield what the log says about the learner's updates; nothing of a round that trains nothing or elsewhere."""
    if not training.last:
        return
    yield (
        f"The learner's updates {training.first:,} to {training.last:,} are one chain: each begins with the state "
        "after the one before, and was trained on the groups of its batch."
    )
    if training.first > 1:
        yield f"Note: updates before {training.first:,} were made by older software, which logged none."
    if training.repeated:
        yield f"Note: {counted(training.repeated, 'update was', 'updates were')} made again, with another result."
    for each in training.retractions:
        yield (
            f"Note: updates {each.first:,} to {each.last:,} were made again without "
            f"{counted(each.left_out, 'group')} of {counted(len(each.owners), 'owner')}: version {each.version}."
        )
    made_again = {each.version for each in training.retractions}
    for version in (each for each in training.replaced if each not in made_again):
        yield f"Note: the operator put version {version} in the place of the learner's state."
    for update, _ in training.settings[1:]:
        yield f"Note: the learner's settings, software or machine changed with update {update:,}."


def _proof_bytes(file: str) -> bytes:
    """Read a proof file; raise `ConfigInvalid` if there is none."""
    if not file:
        raise ConfigInvalid("The command needs a proof file.", hint="They are in rounds/ of a node's home.")
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{file} cannot be read ({error.strerror}).", hint="Check the path.") from None


def witnesses_of(texts: list[str], quorum: int | None) -> "Witnesses":
    """Parse the required witnesses and their quorum from options."""
    from ledger.note import NoteKey
    from ledger.witness import Witnesses

    with _typed():
        keys = tuple(dict.fromkeys(map(NoteKey.parse, texts)))
    if quorum is not None and quorum > len(keys):
        raise ConfigInvalid(f"--quorum {quorum} needs at least {quorum} witnesses.", hint="Add each with --witness.")
    return Witnesses(keys, len(keys) if quorum is None else quorum)


@asynccontextmanager
async def _files(join: "JoinString") -> "AsyncIterator[Origin]":
    """Open a coordinator's public files."""
    import httpx

    from swarm_node.coordinator_api.origin import COORDINATORS, PLAIN, Origin

    async with httpx.AsyncClient(timeout=COORDINATORS.silence_s, headers=PLAIN, follow_redirects=False) as client:
        yield Origin(f"{join.url}/v1", client, COORDINATORS)


async def _verify(
    join: "JoinString", folder: Path | None, save: Path | None, witnesses: "Witnesses", progress: bool
) -> "Verified":
    from rich.console import Console
    from rich.progress import Progress

    from swarm_node.ledger import log_verify
    from swarm_node.ledger.log_reader import Folder, LogReader, Saving

    async with _files(join) as online:
        files: PublicFiles = Folder(folder) if folder else online
        reader = LogReader(Saving(files, save) if save else files)
        console = Console(stderr=True)
        with Progress(console=console, disable=not (progress and console.is_terminal), transient=True) as bar:
            task = bar.add_task("verifying", total=None)
            return await log_verify.verify(
                reader, join.round_id, witnesses, lambda done, total: bar.update(task, completed=done, total=total)
            )


async def _payouts(join: "JoinString", home: Path, offline: bool) -> "tuple[list[tuple[int, PayoutLine | None]], Unit]":
    from swarm_node.coordinator_api.client import Coordinator
    from swarm_node.coordinator_api.join_string import round_folder
    from swarm_node.keys import identity
    from swarm_node.ledger import receipts as keeping

    folder = round_folder(home, join) / keeping.PAYOUTS
    coordinator = Coordinator(join.url, join.round_id, identity.find_identity(home).key)
    try:
        ask = None if offline else coordinator.payout
        lines = [line async for line in keeping.fetch_payouts(ask, join.round_id, folder)]
        return lines, await _unit(None if offline else coordinator.origin, join, home)
    finally:
        await coordinator.close()


async def _unit(origin: "Origin | None", join: "JoinString", home: Path) -> Unit:
    """Return the round's unit, by this node's trust state or the coordinator; the default if neither has it."""
    from swarm_node.coordinator_api.join_string import TRUST_FILE, round_folder
    from swarm_node.versions.updater import round_unit

    return await round_unit(origin, join.round_id, round_folder(home, join) / TRUST_FILE)


async def _receipts(
    join: "JoinString", home: Path, offline: bool, progress: bool
) -> tuple[list[dict[str, str | int]], list[str], Unit]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from swarm_node.coordinator_api.join_string import round_folder
    from swarm_node.keys import identity
    from swarm_node.ledger import receipts as keeping
    from swarm_node.ledger.log_reader import LogReader

    folder = round_folder(home, join)
    if not folder.exists():
        raise ConfigInvalid(
            f"The node in {home} has not joined this round.", hint="Give the node's folder with --home."
        )
    me = identity.find_identity(home).key.node_id
    kept: list[dict[str, str | int]] = []
    missing: list[str] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, disable=not (progress and console.is_terminal), transient=True)
    async with _files(join) as online:
        reader = None if offline else LogReader(online)
        claims = list(keeping.Claims(folder / "claims"))
        shown = bar.add_task("receipts", total=len(claims))
        advance = partial(bar.advance, shown)
        found = keeping.fetch(reader, join.round_id, me, claims, folder / keeping.RECEIPTS, advance)
        with bar:
            async for claim_id, receipt in found:
                if receipt is None:
                    missing.append(claim_id)
                else:
                    amount = receipt.pending.amount_micros
                    kept.append({"claim_id": claim_id, "state": receipt.state, "amount_micros": amount})
        unit = await _unit(None if offline else online, join, home)
    return kept, missing, unit


@contextmanager
def _typed() -> Iterator[None]:
    """Report an invalid key or name as wrong usage, not as a failed check."""
    try:
        yield
    except CheckpointInvalid as error:
        raise ConfigInvalid(error.message, hint=error.hint) from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder: two witnesses at once could sign two histories."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = ConfigInvalid(f"Another witness process is running in {folder}.", hint="Wait for it to end.")
    with disk.hold_lock(folder / "lock", taken):
        yield


async def _submit(join: "JoinString", note: bytes) -> str:
    """Send a cosignature; return the coordinator's outcome."""
    from protocol.wire.signing import NodeKey
    from swarm_node.coordinator_api.client import Coordinator

    coordinator = Coordinator(join.url, join.round_id, NodeKey(bytes(32)))  # nothing is signed with it
    try:
        return (await coordinator.cosign(note)).outcome
    finally:
        await coordinator.close()


async def _witness(join: "JoinString", record: "WitnessRecord", folder: Path) -> bytes:
    """Sign the newest checkpoint of a round, which must continue all that this witness has seen and signed."""
    from ledger.gaps import Keys
    from swarm_node.ledger.log_reader import LogReader
    from swarm_node.ledger.log_watch import LogWatch

    origin = f"echo-swarm/{join.round_id}"
    before = record.find(origin)
    async with _files(join) as files:
        watch = LogWatch(LogReader(files), join.round_id, folder)
        note, _ = await watch.refresh()
        if before is not None:
            await watch.prove(before)
    _, signer = Keys(watch.roots, join.round_id).signed(note)
    signed = record.sign(origin, before, signer, note)
    if signed is None:
        raise ConfigInvalid("Another program of this witness has signed meanwhile.", hint="Try again.")
    return signed


def _record_of(home: Path, name: str) -> "WitnessRecord":
    """Return the record of the witness of a home; its key is made at the first use."""
    import time

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from ledger.note import KeyKind, NoteKey
    from swarm_node.keys import identity
    from swarm_node.ledger.witnessing import WitnessRecord

    private = Ed25519PrivateKey.from_private_bytes(identity.load_or_create(home / "witness.key").seed)
    public = private.public_key().public_bytes_raw()
    with _typed():
        key = NoteKey(name or f"witness/{public.hex()[:16]}", public, KeyKind.WITNESS)
    return WitnessRecord(home / "witness", key, private.sign, lambda: int(time.time()))


async def _log_keys(join: "JoinString") -> "list[NoteKey]":
    """Return the ledger's keys of a round, which the pinned chain of roots names, the newest first."""
    from ledger.gaps import Keys
    from swarm_node.ledger.log_reader import LogReader

    async with _files(join) as files:
        return Keys(await LogReader(files).roots(), join.round_id).newest_first


async def _follow_rotations(join: "JoinString", server: "WitnessServer") -> None:
    """Have a witness trust the newest key of a round's ledger, again and again."""
    import trio

    while True:
        await trio.sleep(RENEW_KEYS_S)
        try:
            newer = await server.trust(await _log_keys(join))
        except SwarmError as error:
            typer.echo(f"the keys of {join.url} cannot be read now: {error}", err=True)
        else:
            if newer:
                typer.echo(f"log: {newer}", err=True)


async def _serve_witness(
    record: "WitnessRecord", logs: "list[NoteKey]", listen: str, join: "JoinString | None"
) -> None:
    """Answer the logs until the program is stopped."""
    import trio

    from protocol.people.addresses import host_and_port
    from swarm_node.base import http_server
    from swarm_node.ledger.witnessing import WitnessServer

    host, port = host_and_port(listen)
    try:
        listener = (await trio.open_tcp_listeners(port, host=host))[0]
    except OSError as error:
        raise ConfigInvalid(f"Cannot listen on {listen}: {error}.", hint="Choose a free port.") from None
    for log_key in logs:
        typer.echo(f"log: {log_key}", err=True)
    typer.echo(f"listening: http://{host}:{listener.socket.getsockname()[1]}", err=True)
    server = WitnessServer(record, logs)
    async with trio.open_nursery() as nursery:
        if join:
            nursery.start_soon(_follow_rotations, join, server)
        await http_server.serve(listener, server.answer)
