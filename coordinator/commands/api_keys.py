"""`swarm-coordinator api-keys`: the keys of those who may query the round's endpoint.

The commands write to the store; a running coordinator accepts a new key at once.
"""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.asking import launched, local_url, run_in_store
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import load
from coordinator.pages.words import ago, line
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.limits import DAY_MS
from protocol.text.commands import lesson
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.config import Config

app = typer.Typer(help="Let others query the swarm over HTTP.", no_args_is_help=True, add_completion=False)


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key: who uses it, and for what.")]
Budget = Annotated[
    int,
    typer.Option(
        min=0,
        help="The most that its queries may cost, in millionths of round.unit: a part of the round's budget.",
    ),
]


@app.command(
    epilog=lesson(
        "swarm-coordinator api-keys create round.toml evaluations --budget 5000000",
        "give the key to its user; docs/endpoint.md has the first request.",
        EXIT_CODES,
    )
)
def create(
    config_file: ConfigFile,
    name: Name,
    settings: Settings,
    budget: Budget,
    days: Annotated[float, typer.Option(min=0, help="Days until it expires; 0: never.")] = 0,
    publishes: Annotated[
        bool, typer.Option("--publishes", help="Also let its user publish versions; needs learner.external.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. It is shown only now: the store keeps no copy."""
    from coordinator.base.clock import now_ms
    from coordinator.transactions import api_keys

    config, moment_ms = load(config_file, settings), now_ms()
    if publishes and not config.learner.external:
        raise ConfigInvalid(
            "In this round, only its own learner publishes versions.",
            hint="A trainer of your own needs a new round with learner.external=true (docs/trainers.md).",
        )
    expires_ms = moment_ms + int(days * DAY_MS) if days else None
    key = run_in_store(
        config, api_keys.make, name, budget, expires_ms=expires_ms, publishes=publishes, now_ms=moment_ms
    )
    if as_json:
        typer.echo(json.dumps({"key": key, "url": _url(config)}))
        return
    fixed = launched(config)
    shown, whole = fixed.round.money.exact, fixed.market.budget_micros
    typer.echo(f"key  {key}\nurl  {_url(config)}\nbudget  {shown(budget)}")
    if budget > whole:
        typer.echo(f"warning: the whole round's budget is {shown(whole)}; --budget is in millionths.", err=True)
    typer.echo(f"Its usage: {_url(config).removesuffix('/v1')}/usage, a page that asks for the key")
    typer.echo(f"Try it: curl {_url(config)}/models -H 'Authorization: Bearer {key}'")


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator api-keys list round.toml", "`api-keys budget` raises one; `revoke` ends one.", EXIT_CODES
    ),
)
def list_(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """List the keys: what each has spent, what is left of its budget, its queries and tokens, and its last use.

    A query is one prompt. What open queries may cost at most is not left.
    """
    from coordinator.base.clock import now_ms
    from coordinator.transactions import api_keys

    config = load(config_file, settings)
    rows = run_in_store(config, api_keys.list_keys)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    unit = launched(config).round.money
    for row in rows:
        typer.echo(
            f"{line(row['name']):24} {_state(row, now_ms()):22} spent {unit.exact(row['spent_micros'])} "
            f"of {unit.exact(row['budget_micros'])}, {unit.exact(row['left_micros'])} left; "
            f"{counted(row['answered_queries'], 'answered query', 'answered queries')}, {row['tokens']:,} tokens, "
            f"{row['open_queries']:,} open, {_last_use(row, now_ms())}"
            f"{', may publish' if row['publishes'] else ''}"
        )
    if not rows:
        typer.echo("There are no keys yet: make one with `swarm-coordinator api-keys create`.")


@app.command(
    epilog=lesson(
        "swarm-coordinator api-keys usage round.toml evaluations", "the page /usage draws the same.", EXIT_CODES
    )
)
def usage(
    config_file: ConfigFile,
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of a key; without it, the sum of all.")] = "",
    days: Annotated[
        int, typer.Option(min=1, max=limits.USAGE_DAYS_MAX, help="The last days to list, today included.")
    ] = limits.USAGE_DAYS,
    as_json: AsJson = False,
) -> None:
    """List the usage of a key by day (UTC): answered queries, tokens of prompts and of answers, and what they cost.

    Days without answers are left out. Tokens and costs of answers that an audit rejected are not counted.
    """
    from coordinator.base.clock import now_ms
    from coordinator.transactions import api_keys

    config = load(config_file, settings)
    rows = run_in_store(config, api_keys.days_of, name or None, days, now_ms=now_ms())
    if as_json:
        typer.echo(json.dumps(rows))
        return
    unit = launched(config).round.money
    for row in rows:
        typer.echo(
            f"{row['day']}  {counted(row['answered_queries'], 'answered query', 'answered queries')}, "
            f"{row['prompt_tokens']:,} tokens in, {row['tokens']:,} out, {unit.exact(row['spent_micros'])}"
        )
    if not rows:
        typer.echo(f"No query was answered in the last {counted(days, 'day')}.")


@app.command(
    epilog=lesson(
        "swarm-coordinator api-keys budget round.toml evaluations --budget 9000000",
        "`api-keys list` shows what is left.",
        EXIT_CODES,
    )
)
def budget(config_file: ConfigFile, name: Name, settings: Settings, budget: Budget) -> None:
    """Set the budget of a key. What it has spent stays spent."""
    from coordinator.transactions import api_keys

    config = load(config_file, settings)
    run_in_store(config, api_keys.set_budget, name, budget)
    typer.echo(f"The budget of {line(name)} is {launched(config).round.money.exact(budget)}.")


@app.command(
    epilog=lesson(
        "swarm-coordinator api-keys revoke round.toml evaluations",
        "its open queries are answered and charged; new ones are refused.",
        EXIT_CODES,
    )
)
def revoke(config_file: ConfigFile, name: Name, settings: Settings) -> None:
    """Revoke a key. It cannot be used again."""
    from coordinator.base.clock import now_ms
    from coordinator.transactions import api_keys

    run_in_store(load(config_file, settings), api_keys.revoke, name, now_ms=now_ms())
    typer.echo(f"The key {name} is revoked.")


def _url(config: "Config") -> str:
    there = launched(config)
    return f"{there.round.public_url.rstrip('/') or local_url(there)}/v1"


def _state(row: dict[str, int | None], now_ms: int) -> str:
    if row["revoked_ms"] is not None:
        return "revoked"
    expires_ms = row["expires_ms"]
    if expires_ms is None:
        return "valid"
    when = f"{datetime.fromtimestamp(expires_ms / 1000, UTC):%Y-%m-%d}"
    return f"expired {when}" if expires_ms <= now_ms else f"valid until {when}"


def _last_use(row: dict[str, Any], now_ms: int) -> str:
    if row["used_ms"] is None:  # also of a key whose queries were deleted before its use was recorded
        return "last use not known" if row["answered_queries"] else "never used"
    return f"used {ago(max(0, now_ms - row['used_ms']))}"
