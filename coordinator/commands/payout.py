"""`swarm-coordinator payout`: pay the balances of the ledger in batches. The round may run meanwhile.

- Every command may be repeated after an interruption; `coordinator.transactions.payouts` explains why nothing is paid
  twice.
- Only one command at a time may create or settle a batch: a second one is rejected, on any machine.
- Money is sent only if the store's balances, addresses and payees follow from the ledger's entries.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.base.clock import now_ms
from coordinator.commands.asking import launched, opened_store
from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import Config, fixed, load
from coordinator.config.money import RailUnit, find_rail_unit, payable_units
from protocol.errors import ConfigInvalid, PayoutFailed
from protocol.text.commands import lesson
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.store.state import Database
    from coordinator.transactions.payouts import StoredBatch
    from coordinator.transactions.rails.base import TransferBatch

app = typer.Typer(help="Pay owners what the ledger owes them.", no_args_is_help=True, add_completion=False)

Number = Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Number of the batch.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong, 3 under way: settle again later."

REFERENCE = re.compile(r"[A-Za-z0-9._/-]{1,100}")
PUBLIC = "The reference stays in the public ledger for ever. It must not name a person or account."


@app.command(
    epilog=lesson(
        "swarm-coordinator payout create round.toml",
        "check the exported files; then `payout settle` with the batch number.",
        EXIT_CODES,
    )
)
def create(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """Create and export a batch of all balances above the minimum that have an active address.

    Rails sepa, paypal, stripe and lightning write a file for the bank, the service or the node, too. Amounts are
    rounded down to what the rail can pay, such as cents; the rest stays payable.
    """
    from coordinator.transactions import payouts, rails

    config = load(config_file, settings)
    with _paying(config) as (database, round_id):
        scheme, unit, rail = rails.scheme(config.payouts), launched(config).round.money, config.payouts.rail
        step_micros = _rail_unit(rail, unit.name).step_micros
        terms = payouts.PayoutTerms(rail, scheme, config.payouts.minimum_micros, unit, step_micros)
        _require_sound(database)
        number = database.run_now(payouts.create, terms, now_ms=now_ms())
        _print_batch(*database.run_now(payouts.load, number, round_id), config, as_json)


@app.command(epilog=lesson("swarm-coordinator payout show round.toml 1", "`payout settle` pays it.", EXIT_CODES))
def show(config_file: ConfigFile, number: Number, settings: Settings, as_json: AsJson = False) -> None:
    """Show a batch, and export it again."""
    from coordinator.transactions import payouts

    config = load(config_file, settings)
    with _opened(config) as (database, round_id):
        _print_batch(*database.run_now(payouts.load, number, round_id), config, as_json)


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator payout list round.toml", "`payout settle` for batches that are not done.", EXIT_CODES
    ),
)
def list_(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """List all batches with their state and amount."""
    from coordinator.transactions import payouts

    config = load(config_file, settings)
    with _opened(config) as (database, _):
        rows, sums = database.run_now(payouts.listed), database.run_now(payouts.sums)
    unit = launched(config).round.money
    if as_json:
        typer.echo(json.dumps([row._asdict() | sums[row.number]._asdict() for row in rows]))
        return
    if not rows:
        typer.echo("There are no batches yet: make one with `swarm-coordinator payout create`.")
    for row in rows:
        typer.echo(
            f"batch {row.number}: {row.state}, {unit.exact(sums[row.number].amount_micros)} to "
            f"{counted(sums[row.number].payees, 'payee')} by rail {row.rail}, reference {row.reference or '-'}"
        )


@app.command(
    epilog=lesson(
        "swarm-coordinator payout settle round.toml 1 --reference transfer-2026-11",
        "after exit code 3, run the same command later: nobody is paid twice.",
        EXIT_CODES,
    )
)
def settle(
    config_file: ConfigFile,
    number: Number,
    settings: Settings,
    reference: Annotated[
        str, typer.Option(help="Reference of your manual payment; public for ever: do not name a person or account.")
    ] = "",
) -> None:
    """Pay a batch by its rail, or confirm your manual payment, and record it in the ledger.

    --reference is for rails that a person pays: manual, sepa, paypal, stripe, lightning. It stays in the public ledger
    for ever: give an opaque number, no name or account. After an interruption, run it again: nothing is paid twice.
    """
    from coordinator.transactions import payouts, rails
    from coordinator.transactions.rails.base import Status

    if reference and not REFERENCE.fullmatch(reference):
        raise ConfigInvalid(
            f"{reference[:40]!r} is not a valid reference.", hint="Use at most 100 letters, digits and ._/- characters."
        )
    config = load(config_file, settings)
    with _paying(config) as (database, round_id):
        row, batch = database.run_now(payouts.load, number, round_id)
        if row.rail != config.payouts.rail:
            raise ConfigInvalid(f"Batch {number} is for rail {row.rail}.", hint=f"Use --set payouts.rail={row.rail}.")
        if reference and row.reference not in (None, reference):
            raise ConfigInvalid(f"Batch {number} was paid by {row.reference}.", hint="See `payout show`.")
        if reference:
            typer.echo(PUBLIC, err=True)
        rail = rails.open_rail(config.payouts, config.round.directory, reference)
        status = payouts.settle(database, row, batch, rail, now_ms=now_ms())
        row, _ = database.run_now(payouts.load, number, round_id)
    typer.echo(f"batch {number}: {status.value}, reference {row.reference or '-'}")
    raise typer.Exit({Status.DONE: 0, Status.FAILED: 1, Status.UNDER_WAY: 3}[status])


@app.command(
    epilog=lesson(
        "swarm-coordinator payout deploy round.toml 0x52908400098527886E0F7030069857D2E4169EE7 --unit 1000000",
        "set payouts.evm_contract to the contract's address; see `config explain --only payouts`.",
        EXIT_CODES,
    )
)
def deploy(
    config_file: ConfigFile,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Address of the token to pay in.")],
    settings: Settings,
    unit: Annotated[int, typer.Option(min=1, help="Smallest token units per micro-unit.")] = 1,
) -> None:
    """Deploy the payouts contract of rail evm. Prints the transaction; its receipt has the address."""
    from coordinator.transactions.rails import evm

    config = load(config_file, settings)
    typer.echo(evm.deploy(evm.open_chain(config.payouts, config.round.directory), token, unit))


def _print_batch(row: "StoredBatch", batch: "TransferBatch", config: Config, as_json: bool) -> None:
    """Export a batch, and print it with the paths of its files."""
    from coordinator.transactions import payouts
    from coordinator.transactions.rails.base import PaymentTerms
    from coordinator.transactions.rails.files import write_files

    unit, folder = launched(config).round.money, config.round.directory / "payouts"
    paths = list(payouts.export(batch, folder))
    if row.rail == config.payouts.rail:  # another rail's settings were not checked
        terms = PaymentTerms(batch, _rail_unit(row.rail, unit.name), row.made_ms, config.payouts)
        paths += write_files(row.rail, terms, folder)
    if as_json:
        typer.echo(json.dumps(row._asdict() | payouts.as_json(batch)))
        return
    typer.echo(
        f"batch {row.number}: {row.state}, {unit.exact(batch.amount_micros)} to "
        f"{counted(len(batch.payees), 'payee')} by rail {row.rail}, reference {row.reference or '-'}"
    )
    typer.echo(f"root {batch.root.hex()}")
    typer.echo("\n".join(map(str, paths)))


def _require_sound(database: "Database") -> None:
    """Refuse to pay from balances that do not follow from the ledger's entries: somebody may have altered them.

    It reads the whole ledger, 40 seconds for a million entries, while the round goes on.
    """
    from ledger import store

    if differences := asyncio.run(database.read(store.rebuild, locked=False)):
        raise PayoutFailed(
            f"The store differs from the ledger's entries in {counted(len(differences), 'place')}; the first is "
            f"{differences[0].where}.",
            hint="Send no money: somebody may have altered the store. Compare it with a backup.",
        )


def _rail_unit(rail: str, unit: str) -> RailUnit:
    """Return how a rail pays the round's unit; raise `ConfigInvalid` if it cannot."""
    found = find_rail_unit(rail, unit)
    if found is None:
        raise ConfigInvalid(f"Rail {rail} cannot pay in {unit}.", hint=f"It pays in {payable_units(rail)}.")
    return found


@contextmanager
def _opened(config: Config) -> "Iterator[tuple[Database, str]]":
    """Yield the store of a round, and the round's id."""
    from coordinator.publishing.signed_metadata import SignedMetadata

    folder = config.round.directory
    fixed.require_round(folder)
    metadata = SignedMetadata(folder / "keys", folder / "metadata", config.publish.timestamp_lifetime_s)
    with closing(opened_store(config)) as database:
        yield database, metadata.round_id


@contextmanager
def _paying(config: Config) -> "Iterator[tuple[Database, str]]":
    """Yield the store and the round's id while no other command can pay."""
    with _opened(config) as (database, round_id), database.alone():
        yield database, round_id
