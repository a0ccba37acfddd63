"""`swarm-coordinator appeals`: appeals of nodes against faults and bans, the evidence, and the operator's rulings.

- The commands query a running coordinator with the operator's token. If it is stopped, they read the store, and no
  ruling is possible.
- The replay is evidence and decides nothing. The operator rules, with a reason code that is in the log.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.commands import audit
from coordinator.commands.asking import ask, launched, run_in_store
from coordinator.commands.nodes import when
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import load
from protocol.errors import Unreachable
from protocol.text.commands import lesson
from protocol.text.money import Unit
from protocol.text.plain import counted

app = typer.Typer(help="Show appeals of nodes, and rule on them.", no_args_is_help=True, add_completion=False)

Number = Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Number of the appeal.")]
SAID = {"granted": "fault_refuted", "denied": "fault_confirmed"}


class RulingWord(StrEnum):
    """The operator's possible rulings on an appeal."""

    GRANT = "grant"
    DENY = "deny"


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator appeals list round.toml", "`appeals show` with a number; then `appeals rule`.", EXIT_CODES
    ),
)
def list_(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """List all appeals: open ones first, the oldest on top, then those with a ruling."""
    from coordinator.transactions import appeals

    config = load(config_file, settings)
    answer = ask(config, "GET", "/v1/operator/appeals")
    rows = run_in_store(config, appeals.listed) if answer is None else answer
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(
            f"{row['number']:4} {row['state']:8} {when(row['made_ms'])} owner {row['owner'][-8:]} "
            f"claim {row['claim_id'][:16]}… {row['reason_code']}".rstrip()
        )
    typer.echo(f"{len(rows)} appeals, {sum(row['state'] == 'open' for row in rows)} wait for a ruling")


@app.command(
    epilog=lesson(
        "swarm-coordinator appeals show round.toml 3 --replay",
        "`appeals rule`: grant it if the replay does not confirm the fault, else deny it.",
        f"{EXIT_CODES[:-1]}; with --replay 0 pass, 3 soft fail, 4 hard fail, 1 no verdict.",
    )
)
def show(
    config_file: ConfigFile,
    number: Number,
    settings: Settings,
    replay: Annotated[
        bool, typer.Option("--replay", help="Repeat the audit now; needs torch and a version that is still kept.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one appeal: its reason, the audit's finding, and the payment if it is granted."""
    from coordinator.transactions import appeals

    config = load(config_file, settings)
    answer = ask(config, "GET", f"/v1/operator/appeals/{number}")
    row = answer or run_in_store(config, lambda connection: appeals.appeal_report(connection, number, config.audit))
    if as_json:
        typer.echo(json.dumps(row))
    else:
        _print(row, config_file, launched(config).round.money)
    if replay:
        audit.replay(config_file, settings, row["claim_id"], tolerance=config.audit.tolerance, as_json=as_json)


@app.command(
    epilog=lesson(
        "swarm-coordinator appeals rule round.toml 3 deny --reason 'the replay differs here, too'",
        "nothing: the ruling is final, and the node receives it.",
        EXIT_CODES,
    )
)
def rule(
    config_file: ConfigFile,
    number: Number,
    word: Annotated[
        RulingWord,
        typer.Argument(metavar="grant|deny", help="grant (pay voided claims, lift fault and ban) or deny."),
    ],
    settings: Settings,
    code: Annotated[
        str, typer.Option(help="Reason code for the log, in lower case; default: fault_refuted or fault_confirmed.")
    ] = "",
    said: Annotated[str, typer.Option("--reason", help="Reason as text, for the node; stored outside the log.")] = "",
) -> None:
    """Rule on an appeal. The ruling is final: it adds one log entry, and one for each claim that is paid.

    `grant` pays every claim that the fault or ban voided, lifts the fault, and ends a ban based on it. If the
    budget does not cover the payment, the ruling is rejected.
    """
    from coordinator.transactions.orders import whoami

    config = load(config_file, settings)
    outcome = "granted" if word is RulingWord.GRANT else "denied"
    wanted = {"number": number, "outcome": outcome, "reason_code": code or SAID[outcome]}
    done = ask(config, "POST", "/v1/operator/rulings", wanted | {"said": said, "given_by": whoami()})
    if done is None:
        raise Unreachable(
            f"No coordinator answers at {config.round.listen}.",
            hint="Start it with `swarm-coordinator launch`, then repeat the ruling.",
        )
    if not done["changed"]:
        typer.echo(f"appeal {number} was already {done['state']} as {done['reason_code']}; nothing changed")
        return
    unit = launched(config).round.money
    typer.echo(
        f"appeal {number} {done['state']} as {done['reason_code']}: "
        f"{counted(done['reinstated_claims'], 'claim')}, {unit.exact(done['reinstated_micros'])} reinstated"
    )


def _print(row: dict[str, Any], config_file: Path, unit: Unit) -> None:
    from coordinator.base.terminal import block

    typer.echo(f"appeal {row['number']}, {row['state']} {row['reason_code']}".rstrip())
    typer.echo(f"made {when(row['made_ms'])} by {row['signer']}, owner {row['owner']}, about {row['about']}")
    typer.echo(block(row["reason"]) if row["reason"] else "no reason given")
    report = json.loads(row["report"])
    typer.echo(
        f"claim {row['claim_id']} of version {row['version']}, audit: {row['finding'] or 'none, a ban by order'}"
    )
    for finding in report.get("findings", ()):
        typer.echo(
            f"{finding['rule']}, {finding['outcome']}: expected {finding['expected']}; observed {finding['observed']}"
        )
    if "validator" in report:
        typer.echo(f"validator {report['validator']}, tolerances {report['tolerance']} version {report['calibration']}")
    if row["state"] == "open":
        ends = ", and end the ban" if row["ends_ban"] else ""
        typer.echo(
            f"granting it pays {counted(len(row['claims']), 'claim')}, {unit.exact(row['amount_micros'])} of "
            f"{unit.exact(row['free_micros'])} free{ends}"
        )
        typer.echo(f"swarm-coordinator appeals show {config_file} {row['number']} --replay")
    elif row["said"]:
        typer.echo(f"{row['ruled_by']} said {when(row['ruled_ms'])}:\n{block(row['said'])}")
