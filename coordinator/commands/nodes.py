"""`swarm-coordinator nodes`: list the nodes, pause them, and ban their owners.

- Names of nodes, and text of theirs in rejections, are printed as on the pages, without control characters.
- The commands query a running coordinator with the operator's token. If it is stopped, they read the store, and no
  order is possible.
"""

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from coordinator.commands.asking import ask, launch_command, launched, run_in_store, stopped_line, stopped_since_ms
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings, Yes, confirm
from coordinator.config import Config, load
from coordinator.pages.words import line, readable
from protocol.errors import Unreachable
from protocol.text.commands import lesson
from protocol.text.money import Unit
from protocol.text.plain import counted

app = typer.Typer(help="List and show nodes, pause them, ban their owners.", no_args_is_help=True, add_completion=False)

UNCHANGED = {
    "pause": "is paused already",
    "resume": "is not paused",
    "ban": "is banned already",
    "unban": "is not banned",
}
"""The reason why an order changes nothing."""

Node = Annotated[
    str,
    typer.Argument(metavar="NODE", help="The node's id, 6 or more characters from either end of it, or its name."),
]
Reason = Annotated[str, typer.Option(help="Reason; it is recorded, and the owner of a banned node sees it.")]
NO_REASON = "no reason given"


@app.command(
    "list",
    epilog=lesson("swarm-coordinator nodes list round.toml", "`nodes show` for details of one node.", EXIT_CODES),
)
def list_(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """List all nodes, the best earner first.

    Other commands accept a node's id, six or more characters from either end of it, or its name.
    """
    from coordinator.reports import moderation
    from coordinator.reports.summary import AFTER_ALL_MS

    config = load(config_file, settings)
    answer = ask(config, "GET", "/v1/operator/nodes")
    rows = run_in_store(config, partial(moderation.listed, alive_since_ms=AFTER_ALL_MS)) if answer is None else answer
    if as_json:
        typer.echo(json.dumps(rows))
        return
    unit = launched(config).round.money
    for row in rows:
        name = readable(row["name"], row["node_id"])
        typer.echo(
            f"{row['node_id'][-8:]} {name:20} {_state(row):10} version {row['version']:<5} "
            f"{row['accepted_rollouts']:,} accepted, {row['rejected_rollouts']:,} rejected, "
            f"earned {unit.short_figure(row['posted_micros'])}, pending {unit.amount(row['pending_micros'])}, "
            f"asks {unit.price(row['price_micros_per_mtok'])}{_since(row)}"
        )
    typer.echo(counted(len(rows), "node"))
    if answer is None:
        typer.echo(stopped_line(config, launch_command(config_file, settings), stopped_since_ms(config)))


@app.command(
    epilog=lesson(
        "swarm-coordinator nodes show round.toml calm-heron-417",
        "`nodes pause` while you investigate; `audit replay` for a suspicious claim.",
        EXIT_CODES,
    )
)
def show(config_file: ConfigFile, node: Node, settings: Settings, as_json: AsJson = False) -> None:
    """Show one node: its owner, its work, its rejected answers, and your orders about it."""
    from coordinator.reports import moderation
    from coordinator.reports.summary import AFTER_ALL_MS

    config = load(config_file, settings)
    answer = ask(config, "GET", f"/v1/operator/nodes/{quote(node, safe='')}")
    about = partial(moderation.node_report, text=node, alive_since_ms=AFTER_ALL_MS)
    row = run_in_store(config, about) if answer is None else answer
    if as_json:
        typer.echo(json.dumps(row, default=str))
        return
    unit = launched(config).round.money
    typer.echo(f"{readable(row['name'], row['node_id'])}, {_state(row)}\nnode  {row['node_id']}\nowner {row['owner']}")
    typer.echo(
        f"last seen {when(row['last_seen_ms'])}, version {row['version']}, {row['tokens_per_s']:.1f} tokens/s, "
        f"asks {unit.price(row['price_micros_per_mtok'])}"
    )
    typer.echo(
        f"earned {unit.short_figure(row['posted_micros'])}, pending {unit.short_figure(row['pending_micros'])}, "
        f"void {unit.amount(row['voided_micros'])}; "
        f"leases: {', '.join(f'{count} {outcome}' for outcome, count in row['leases'].items()) or 'none'}"
    )
    for refusal in row["refusals"]:
        typer.echo(
            f"rejected {counted(refusal['count'], 'time')} with {refusal['code']}: {line(refusal['last_message'])}"
        )
    for given in row["orders"]:
        typer.echo(f"{when(given['given_ms'])} {given['action']} by {given['given_by']}: {given['reason']}")


@app.command(
    epilog=lesson(
        "swarm-coordinator nodes pause round.toml calm-heron-417 --reason 'its clock is wrong'",
        "`nodes resume` when the problem is solved.",
        EXIT_CODES,
    )
)
def pause(config_file: ConfigFile, node: Node, settings: Settings, reason: Reason = NO_REASON) -> None:
    """Pause a node: it gets no new work. It may finish its leases and is paid for them."""
    _order(config_file, settings, "pause", node, reason)


@app.command(
    epilog=lesson(
        "swarm-coordinator nodes resume round.toml calm-heron-417",
        "`nodes show` shows whether its answers are accepted.",
        EXIT_CODES,
    )
)
def resume(config_file: ConfigFile, node: Node, settings: Settings, reason: Reason = NO_REASON) -> None:
    """Resume a paused node."""
    _order(config_file, settings, "resume", node, reason)


@app.command(
    epilog=lesson(
        "swarm-coordinator nodes ban round.toml calm-heron-417 --reason 'made up its samples'",
        "`appeals list`: the owner may appeal. `nodes unban` reverses a ban.",
        EXIT_CODES,
    )
)
def ban(
    config_file: ConfigFile,
    node: Node,
    settings: Settings,
    reason: Reason,
    yes: Yes = False,
) -> None:
    """Ban the owner of a node, with all their nodes. Ledger entries void all claims that no audit confirmed.

    Their leases end, their groups leave the learner's buffer, and their nodes receive the reason. The command first
    shows what would be voided, and asks.
    """
    if not yes:
        config = load(config_file, settings)
        found = _answered(config, ask(config, "GET", f"/v1/operator/bans/{quote(node, safe='')}"))
        for text in ban_lines(found, launched(config).round.money):
            typer.echo(text, err=True)
        if not found["banned"]:
            confirm("Ban this owner? `nodes unban` does not pay voided claims.")
    _order(config_file, settings, "ban", node, reason)


@app.command(
    epilog=lesson(
        "swarm-coordinator nodes unban round.toml calm-heron-417 --reason 'the card was broken'",
        "`appeals rule` pays voided claims, if the ban was wrong.",
        EXIT_CODES,
    )
)
def unban(config_file: ConfigFile, node: Node, settings: Settings, reason: Reason) -> None:
    """Unban an owner. Voided claims stay void, and new work is first audited in full."""
    _order(config_file, settings, "unban", node, reason)


def _order(config_file: Path, settings: list[str], action: str, node: str, reason: str) -> None:
    from coordinator.transactions.orders import whoami

    config = load(config_file, settings)
    wanted = {"action": action, "node": node, "reason": reason, "given_by": whoami()}
    done = _answered(config, ask(config, "POST", "/v1/operator/orders", wanted))
    what = f"owner {done['owner']}" if action in ("ban", "unban") else f"node {done['node_id']}"
    typer.echo(f"{action}: {what}" if done["changed"] else f"{what} {UNCHANGED[action]}: nothing changed")


def _answered(config: Config, answer: Any) -> Any:
    if answer is None:
        raise Unreachable(
            f"No coordinator answers at {config.round.listen}.",
            hint="Start it with `swarm-coordinator launch`, then repeat the order.",
        )
    return answer


def ban_lines(found: dict[str, Any], unit: Unit) -> list[str]:
    """Return what a ban would change, as lines."""
    if found["banned"]:
        return [f"Owner {found['owner']} is banned already."]
    return [
        f"This bans owner {found['owner']} with {counted(found['nodes'], 'node')}:",
        f"  {counted(found['void_claims'], 'claim')} worth {unit.short_figure(found['void_micros'])} would be void,",
        f"  {counted(found['kept_claims'], 'claim')} worth {unit.short_figure(found['kept_micros'])}, which audits "
        "found right, would be paid,",
        f"  {counted(found['leases'], 'lease')} would end, and {counted(found['groups'], 'group')} would leave the "
        "learner's buffer.",
    ]


def _state(row: dict[str, Any]) -> str:
    for name in ("banned", "revoked", "paused"):
        if row[f"{name}_ms"] is not None:
            return name
    if row.get("alive", True) or row["phase"] == "left":  # an older coordinator does not send `alive`
        return str(row["phase"])
    return "silent"


def _since(row: dict[str, Any]) -> str:
    """Return the time of the last heartbeat of a node that sends none now."""
    return "" if row.get("alive", True) else f", last heartbeat {when(row['last_seen_ms'])} UTC"


def when(moment_ms: int) -> str:
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
