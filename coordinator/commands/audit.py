"""`swarm-coordinator audit` and `calibrate`: check that a stored rollout was sampled as its lease requires.

- These commands only read: a running coordinator is not disturbed, and their verdicts change no credit.
- The exit code is the verdict, for scripts.
"""

import json
import shlex
import signal
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coordinator.commands.nodes import when
from coordinator.commands.options import EXIT_CODES, AsJson, ConfigFile, Settings
from coordinator.config import load
from protocol.errors import AuditFailed, ConfigInvalid, ProofInvalid, SwarmError
from protocol.text.commands import lesson
from protocol.text.money import Unit
from protocol.text.plain import counted, one_line
from protocol.work.lease import is_exact

if TYPE_CHECKING:
    from coordinator.audit.case import Case, RoundArchive
    from coordinator.audit.check import ExactReplay, Score
    from coordinator.rules.replay import ReplayMeasurement
    from coordinator.rules.verdict import AuditReport

app = typer.Typer(help="Replay claims and export the evidence.", no_args_is_help=True, add_completion=False)

EXIT_OF_OUTCOME = (0, 3, 4, 5)
"""Exit codes for pass, soft fail, hard fail and held; 1 and 2 mean that there is no verdict."""

NO_VERDICT = 3
"""Exit code for a replay that says nothing about the learner; 1 would also be a crash."""

MISMATCH = EXIT_OF_OUTCOME[2]
"""Exit code for an update that was not made from what the log says."""

DEFAULT_CLASS = "torch/fp32/cpu"
"""The compute class of the shipped engine."""

WHY = {
    "": "not drawn",
    "drawn": "by lottery",
    "learner": "the learner found it suspect",
    "fault": "another claim of its owner was a fault",
    "held": "its class was calibrated",
}
"""The reasons of an audit, in words."""

FINDINGS = {"pass": "pass", "soft": "soft fail", "hard": "hard fail", "pardon": "pardoned: no auditor could judge it"}

Neighbours = Annotated[
    int, typer.Option(min=0, max=16, help="Number of earlier versions to compare with: 1, 2, 4, … before; 0: none.")
]


@app.command(
    epilog=lesson(
        "swarm-coordinator audit replay round.toml CLAIM",
        "`nodes show` for its node; after a hard fail, `nodes ban` if necessary.",
        "Exit codes: 0 pass, 3 soft fail, 4 hard fail, 5 held for a calibration, 1 no verdict, 2 a setting is wrong.",
    )
)
def replay(
    source: Annotated[
        Path, typer.Argument(metavar="ROUND", help="The round's TOML file, or a folder made by `audit export`.")
    ],
    settings: Settings,
    claim: Annotated[
        str,
        typer.Argument(metavar="CLAIM", help="Id of the claim; optional for an exported folder, which has one claim."),
    ] = "",
    tolerance: Annotated[
        str, typer.Option(help="Tolerance class, if the lease has none: engine/dtype/device.")
    ] = DEFAULT_CLASS,
    neighbours: Neighbours = 3,
    again: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="Command that the report shows for repeating this replay; default: this command."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Replay one claim on its version, and report whether its tokens follow from its seed.

    Changes nothing. The version must still be kept. Verdict "held": the claim fails by tolerances measured on
    another policy, so there is no fault. Instead of the file, you can give a folder made by `audit export`.
    """
    from coordinator.audit.case import RoundArchive

    if source.is_dir():
        case, report = _audit(source, tolerance, claim)
    else:
        with closing(RoundArchive(load(source, settings))) as archive, tempfile.TemporaryDirectory() as folder:
            archive.export(claim, Path(folder), neighbours=neighbours)
            case, report = _audit(Path(folder), tolerance)
    words = ["swarm-coordinator", "audit", "replay", str(source), case.claim_id, "--tolerance", tolerance]
    words += ["--neighbours", str(neighbours), *(word for setting in settings for word in ("--set", setting))]
    _print(case, report, again or shlex.join(words), as_json)
    raise typer.Exit(EXIT_OF_OUTCOME[report.outcome])


@app.command(
    epilog=lesson(
        "swarm-coordinator audit update audit-files",
        "publish the folder if an update does not match: anyone repeats this command with it.",
        "Exit codes: 0 all match, 4 an update or its files do not match the log, 3 no verdict, 2 wrong usage.",
    )
)
def update(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that `swarm-node audit-learner --save` made.")
    ],
) -> None:
    """Replay committed updates of a learner from a folder, and compare each state with the root in the log.

    Needs the same version of torch and a processor or card of the same kind as the learner's.
    """
    if not (folder / "updates.json").is_file():
        raise ConfigInvalid(f"{folder} has no updates.json.", hint="`swarm-node audit-learner --save` makes it.")
    from coordinator.base.children import leave_with_parent
    from coordinator.learner import launch, replaying

    try:
        if launch.is_launched():
            leave_with_parent(launch.LOST)
        else:
            launch.forget_ranks()
            if (processes := replaying.processes_of(folder)) > 1:
                raise typer.Exit(by_ranks(folder, processes))
        for replayed in replaying.replay(folder, typer.echo):
            number, root = replayed.entry.update, replayed.entry.after
            if replayed.matches:
                typer.echo(f"update {number}: the replay ends with the state {root[:16]}… of the log, to the bit")
            elif different := replaying.differences(folder):
                raise replaying.NoVerdict(
                    f"Update {number}: the replay ends with {replayed.root[:16]}…, the log has {root[:16]}…, but "
                    f"{'; '.join(different)}.",
                    hint="Repeat it on a machine like the learner's, with the same versions.",
                )
            else:
                typer.echo(
                    f"update {number} DOES NOT MATCH: the replay ends with {replayed.root}, the log has {root}. "
                    "It was not made from this state, these groups and these settings."
                )
                raise typer.Exit(MISMATCH)
    except ProofInvalid as error:
        typer.echo(one_line(f"DOES NOT MATCH: {error.message}"))
        raise typer.Exit(MISMATCH) from None
    except replaying.NoVerdict as error:
        typer.echo(one_line(f"no verdict: {error.message} {error.hint}"))
        raise typer.Exit(NO_VERDICT) from None
    except RuntimeError as error:
        if isinstance(error, typer.Exit) or not launch.is_launched():
            raise
        typer.echo(one_line(f"A rank failed, or lost another: {error}")[:500], err=True)
        raise typer.Exit(launch.LOST) from None


def by_ranks(folder: Path, processes: int) -> int:
    """Replay updates of several ranks by as many processes of this command; return the exit code.

    A mismatch counts whichever rank found it: only one of them computes with a group that no learner can have used.
    """
    from coordinator.base.children import script
    from coordinator.learner import launch

    ended = launch.run_quietly([script("swarm-coordinator"), "audit", "update", str(folder)], processes)
    if ended.failed is None:
        return 0
    for code in (MISMATCH, NO_VERDICT):
        if code in ended.codes:
            if line := ended.last_lines[ended.codes.index(code)]:
                typer.echo(line)
            return code
    code = ended.codes[ended.failed]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    advice = "Repeat it with more memory." if code == -signal.SIGKILL else "The lines above may say why."
    typer.echo(f"no verdict: rank {ended.failed} of {processes} {how} before the replay was over. {advice}")
    return NO_VERDICT


@app.command(
    "list",
    epilog=lesson(
        "swarm-coordinator audit list round.toml --node calm-heron-417",
        "`audit show` for the evidence of one claim.",
        EXIT_CODES,
    ),
)
def list_(
    config_file: ConfigFile,
    settings: Settings,
    node: Annotated[str, typer.Option(help="Only this node: its id, part of it, or its name.")] = "",
    count: Annotated[int, typer.Option(min=1, max=1000, help="Number of audits.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest audits with their verdicts; the newest claim comes first."""
    from coordinator.commands.asking import ask, launched, run_in_store
    from coordinator.reports.audit_record import recent_audits

    config = load(config_file, settings)
    rows = ask(config, "GET", f"/v1/operator/audits?node={quote(node, safe='')}&count={count}")
    if rows is None:
        rows = run_in_store(config, lambda connection: recent_audits(connection, node, count))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    unit = launched(config).round.money
    for row in rows:
        typer.echo(list_line(row, unit))
    more = "; there may be more, which --count shows" if len(rows) == count else ""
    typer.echo(counted(len(rows), "audit") + more)


@app.command(
    epilog=lesson(
        "swarm-coordinator audit show round.toml 3f9a01c27be4",
        "`audit replay` repeats it; `nodes show` and `audit provenance` for its node.",
        EXIT_CODES,
    )
)
def show(
    config_file: ConfigFile,
    claim: Annotated[str, typer.Argument(metavar="CLAIM", help="Id of a claim, its beginning, or its lease's id.")],
    settings: Settings,
    as_json: AsJson = False,
) -> None:
    """Show one audit: why the claim was drawn, its verdict with the evidence, and what became of its money."""
    from coordinator.commands.asking import ask, launched, run_in_store
    from coordinator.reports.audit_record import audit_record

    config = load(config_file, settings)
    row = ask(config, "GET", f"/v1/operator/audits/{quote(claim, safe='')}") or run_in_store(
        config, lambda connection: audit_record(connection, claim)
    )
    if as_json:
        typer.echo(json.dumps(row))
        return
    for text in record_lines(row, launched(config).round.money):
        typer.echo(text)
    typer.echo(f"swarm-coordinator audit replay {config_file} {row['claim_id']}")


@app.command(
    epilog=lesson(
        "swarm-coordinator audit export round.toml CLAIM case",
        "`audit replay case` on any machine that has the case and this program.",
        EXIT_CODES,
    )
)
def export(
    config_file: ConfigFile,
    claim: Annotated[str, typer.Argument(metavar="CLAIM", help="Id of the claim.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for the case; created if it does not exist.")
    ],
    settings: Settings,
    neighbours: Neighbours = 3,
) -> None:
    """Export one claim with all data for its replay to a folder, for another machine.

    The folder holds the signed rollout, its lease, the tolerances and the policies.
    """
    from coordinator.audit.case import RoundArchive

    if folder.exists() and any(folder.iterdir()):
        raise ConfigInvalid(f"{folder} is not empty.", hint="Choose a new folder.")
    with closing(RoundArchive(load(config_file, settings))) as archive:
        archive.export(claim, folder, neighbours=neighbours)
    typer.echo(f"swarm-coordinator audit replay {shlex.quote(str(folder))}")


@app.command(
    epilog=lesson(
        "swarm-coordinator audit provenance round.toml calm-heron-417",
        "`nodes ban`, then `retract` trains again without them; or `policy rollback` to a version before theirs.",
        "Exit codes: 0 done, 1 failed, 2 a setting is wrong.",
    )
)
def provenance(
    config_file: ConfigFile,
    owner: Annotated[
        str, typer.Argument(metavar="OWNER", help="Id of the owner, or a node: its id, part of it, or its name.")
    ],
    settings: Settings,
) -> None:
    """List the updates that used an owner's groups, and the first version with each: one JSON line per update."""
    from coordinator.audit.case import RoundArchive
    from coordinator.reports import moderation
    from coordinator.transactions import standings

    with closing(RoundArchive(load(config_file, settings))) as archive:
        for row in archive.read(standings.provenance, archive.read(moderation.find_owner, owner)):
            typer.echo(json.dumps(row))


def calibrate(
    config_file: ConfigFile,
    settings: Settings,
    node: Annotated[str, typer.Option(help="Id of an honest node that you run yourself.")],
    name: Annotated[str, typer.Option("--class", help="Compute class of the node: engine/dtype/device.")],
    model: Annotated[str, typer.Option(help="Description of the round's model.")] = "the round's own",
) -> None:
    """Measure how much an honest node's rollouts differ from their replay, and sign the result as tolerances.

    Needs the round's targets key, and rollouts of versions that are still kept.
    """
    from coordinator.audit.case import RoundArchive
    from coordinator.publishing.signed_metadata import RoleKeys
    from coordinator.rules import calibration

    config = load(config_file, settings)
    folder = config.round.directory
    with closing(RoundArchive(config)) as archive:
        root = archive.metadata.root()
        signers = RoleKeys(folder / "keys").signers(root, calibration.ROLE)
        derived = calibration.derive(name, _probes(archive, node), archive.metadata.round_id)
        made = calibration.load(folder, root).with_class(derived, made=datetime.now(UTC).date(), model=model)
        calibration.save(folder, made, signers)
    typer.echo(derived.model_dump_json(indent=2))


def _probes(archive: "RoundArchive", node: str) -> "list[ReplayMeasurement]":
    """Measure every accepted claim of a node whose version is still kept."""
    from coordinator.audit.check import replay

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = [case for claim in archive.claims_of(node) if (case := archive.case(claim, folder)) is not None]
        replays = replay(cases, _scores(folder))
    return [measured for replayed in replays if not isinstance(replayed, SwarmError) for measured in replayed.values()]


def _audit(folder: Path, tolerance: str, claim: str = "") -> "tuple[Case, AuditReport]":
    """Return the case in a folder, with its verdict; raise an error if it is not of `claim`."""
    from coordinator.audit.case import POLICIES, open_case
    from coordinator.audit.check import audit
    from coordinator.rules import calibration

    case = open_case(folder)
    if claim not in ("", case.claim_id):
        raise AuditFailed(f"{folder} contains another claim: {case.claim_id}.")
    exact = _exact(folder / POLICIES, case.lease.version) if is_exact(case.lease.judged_as) else None
    made = calibration.read(folder / calibration.FILE)
    (report,) = audit([case], _scores(folder / POLICIES), made, tolerance, exact)
    return case, report


def _scores(policies: Path) -> "Score":
    """Return a function that scores claims with the model of a version, from a folder of policy folders."""
    from coordinator.audit.scorer import VersionScorer

    return lambda version, claims: VersionScorer(policies / str(version)).score(claims)


def _exact(policies: Path, version: int) -> "ExactReplay | None":
    """Return this machine's replay to the bit, from a folder of policy folders; None if it cannot compute exactly."""
    from coordinator.audit.check import ExactReplay
    from coordinator.audit.exact_scorer import ExactScorer, own_class

    try:
        own = own_class(policies / str(version))
    except SwarmError as error:
        typer.echo(f"not replayed to the bit: {error}", err=True)
        return None
    return ExactReplay(own, lambda version, claims: ExactScorer(policies / str(version)).score(claims))


def _verdict(row: dict[str, Any]) -> str:
    """Return the verdict of an audit, or why there is none, in words."""
    if row["held_as"]:
        return f"held until class {row['held_as']} is calibrated" if row["held_as"] != "lost" else "cannot be judged"
    return FINDINGS.get(row["finding"], row["finding"]) if row["finding"] else "no verdict yet"


def list_line(row: dict[str, Any], unit: Unit) -> str:
    """Return the line of an audit in the list."""
    from coordinator.pages.words import readable

    accepted = when(row["accepted_ms"]) if row["accepted_ms"] else "-"
    amount = unit.amount(row["amount_micros"]) if row["amount_micros"] is not None else "no credit"
    name = readable(row["name"] or "", row["node_id"])
    return (
        f"{row['claim_id'][:12]} {accepted} {name:20} version {row['version']:<5} "
        f"{_verdict(row)}, {WHY.get(row['why'], row['why'])}, {amount}"
    )


def record_lines(row: dict[str, Any], unit: Unit) -> list[str]:
    """Return the stored record of an audit as lines."""
    from coordinator.pages.words import readable

    report, drawn, verdict = row["report"], WHY.get(row["why"], row["why"]), _verdict(row)
    judged = f", {when(row['judged_ms'])}" if row["judged_ms"] else ""
    lines = [
        f"claim {row['claim_id']} of {readable(row['name'] or '', row['node_id'])}, version {row['version']}",
        f"node  {row['node_id']}\nowner {row['owner']}\nlease {row['lease_id']}",
        f"drawn: {drawn} (epoch {row['epoch']} is {row['epoch_state']}; rate {row['rate_ppm'] / 10_000:.2f}%)",
        f"verdict: {verdict}{judged}",
    ]
    if row["taken_by"] and not row["finding"]:
        lines.append(f"auditor {row['taken_by']} has it, {counted(row['tries'], 'auditor')} lost it before")
    lines += [
        f"{finding['rule']}, {finding['outcome']}: expected {finding['expected']}; observed {finding['observed']}"
        for finding in report.get("findings", ())
    ]
    if "validator" in report:
        lines.append(
            f"validator {report['validator']}, tolerances {report['tolerance']} version {report['calibration']}"
        )
    money = (
        f"{row['money']}, {unit.exact(row['amount_micros'])} for {row['tokens']:,} tokens" if row["money"] else "none"
    )
    lines.append(f"credit: {money}" + ("; in escrow" if not row["settled"] else ""))
    if row["fault"]:
        lines.append(f"void because of the fault of claim {row['fault']}")
    if row["ban_ms"]:
        lines.append(f"void because its owner was banned, {when(row['ban_ms'])}")
    lines += [f"appeal {number}: `swarm-coordinator appeals show` has it" for number in row["appeals"]]
    return lines


def _print(case: "Case", report: "AuditReport", command: str, as_json: bool) -> None:
    about = {"claim_id": case.claim_id, "node": case.node, "lease_id": case.lease.lease_id}
    if as_json:
        row = {**about, "version": case.lease.version, **report.to_json(), "command": command}
        typer.echo(json.dumps(row, indent=2))
        return
    if report.outcome is report.outcome.HELD:
        typer.echo(
            f"No fault: the tolerances of {report.tolerance} were measured on another policy. The claim is "
            "judged when `swarm-coordinator calibrate` has measured them on this round's policy."
        )
    summary = report.summary
    typer.echo(f"{report.outcome.words}: claim {case.claim_id} of {case.node}, version {case.lease.version}")
    typer.echo(
        f"{summary.positions} tokens, {summary.dictated_share:.2%} as the seed dictates, {summary.out_share:.2%} "
        f"outside the tolerance; error of the log-probabilities: mean {summary.error_mean:.2g}, "
        f"p99 {summary.error_p99:.2g}, max {summary.error_max:.2g} nats"
    )
    for finding in report.findings:
        typer.echo(f"{finding.rule}, {finding.outcome.words}: expected {finding.expected}; observed {finding.observed}")
        for place in finding.positions:
            typer.echo(
                f"  sample {place.sample}, position {place.position}: token {place.claimed} claimed with "
                f"{place.claimed_logprob:.4f}, {place.dictated} dictated by {place.margin:.3g} nats; "
                f"the claimed one has {place.logprob:.4f}"
            )
    for fit in report.fits:
        typer.echo(
            f"version {fit.version}: lean {fit.lean:.2f} ({fit.standard_errors:.1f} standard errors), dictates "
            f"{fit.only_here} tokens that the claimed version does not, and not {fit.only_there} that it does"
        )
    typer.echo(f"validator {report.validator}, tolerances {report.tolerance} version {report.calibration}")
    typer.echo(command)
