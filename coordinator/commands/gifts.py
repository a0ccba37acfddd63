"""`swarm-coordinator gifts`: money that others give to the round's budget.

The commands write to the store; a running coordinator leases from the raised budget at once.
"""

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.asking import launched, run_in_store
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import load
from coordinator.pages.words import line
from protocol.errors import ConfigInvalid
from protocol.text.commands import lesson
from protocol.text.money import MICROS
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.config import Config

app = typer.Typer(help="Record money that others give to the budget.", no_args_is_help=True, add_completion=False)

Number = Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Number of the gift.")]


@app.command(
    epilog=lesson(
        'swarm-coordinator gifts add round.toml 25.00 --from "Anna" --reference booking-4711',
        "the front page and the listing show it; `gifts list` lists all.",
        EXIT_CODES,
    )
)
def add(
    config_file: ConfigFile,
    amount: Annotated[str, typer.Argument(metavar="AMOUNT", help="The amount in the round's unit, such as 12.50.")],
    settings: Settings,
    giver: Annotated[str, typer.Option("--from", help="Who gave it, in their words; shown on the page.")],
    reference: Annotated[str, typer.Option(help="Reference of the payment, kept private; each is recorded once.")],
    as_json: AsJson = False,
) -> None:
    """Record money that you have received, and raise the round's budget by it, for ever.

    The public ledger gets the amount and a digest of --from, which nobody can guess; `gifts forget` erases the words.
    A deposit cannot be taken back: record only money that has arrived.
    """
    from coordinator.base.clock import now_ms
    from coordinator.transactions import gifts

    config = load(config_file, settings)
    _require_launched(config)
    made = run_in_store(config, gifts.record, giver, _micros(amount), reference, now_ms=now_ms())
    if as_json:
        typer.echo(json.dumps(made._asdict()))
        return
    unit = launched(config).round.money
    what = "Recorded" if made.is_new else "This payment was recorded before as"
    typer.echo(f"{what} gift {made.number}: {unit.exact(_micros(amount))} from {line(giver)}.")
    typer.echo(f"Entry of the ledger: deposit {made.entry_reference}")


@app.command(
    "list", epilog=lesson("swarm-coordinator gifts list round.toml", "`gifts forget` erases who gave one.", EXIT_CODES)
)
def list_(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """List all gifts, the oldest first."""
    from coordinator.transactions import gifts

    config = load(config_file, settings)
    rows = run_in_store(config, gifts.list_gifts)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    unit = launched(config).round.money
    for row in rows:
        giver = line(row["given_by"]) or "(erased)"
        typer.echo(
            f"{row['number']:4} {unit.exact(row['amount_micros']):>16} {giver}, payment {line(row['reference'])}"
        )
    total = unit.exact(sum(row["amount_micros"] for row in rows))
    typer.echo(f"{counted(len(rows), 'gift')}, {total}")


@app.command(
    epilog=lesson("swarm-coordinator gifts forget round.toml 3", "`gifts list` shows it without a name.", EXIT_CODES)
)
def forget(config_file: ConfigFile, number: Number, settings: Settings) -> None:
    """Erase who gave a gift, from the store and the page; its amount stays in the ledger."""
    from coordinator.transactions import gifts

    run_in_store(load(config_file, settings), gifts.forget_giver, number)
    typer.echo(f"The giver of gift {number} is erased.")


def _require_launched(config: "Config") -> None:
    """Raise an error for a draft, whose books begin again with each change of its budget."""
    from coordinator.config import fixed

    if not fixed.was_launched(config.round.directory):
        raise ConfigInvalid("This round was not launched yet.", hint="Launch it first; then record gifts.")


def _micros(amount: str) -> int:
    """Return an amount in micro-units; raise an error for anything but a positive decimal number."""
    try:
        micros = Decimal(amount) * MICROS
        exact = int(micros) if micros.is_finite() and abs(micros) < 2**63 else 0
    except (ArithmeticError, ValueError):
        micros, exact = Decimal(0), 0
    if exact <= 0 or exact != micros:
        raise ConfigInvalid(f"{amount[:40]!r} is not an amount.", hint="Write it with a point, such as 12.50.")
    return exact
