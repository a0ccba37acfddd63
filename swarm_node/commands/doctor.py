"""`swarm-node doctor`: check whether this machine can take part in a round, and report the fix of each problem."""

import json
from pathlib import Path
from typing import Annotated

import typer

from swarm_node.base import logs
from swarm_node.commands.options import (
    DEFAULT_HOME,
    AsJson,
    Device,
    DeviceOption,
    DtypeOption,
    EngineDtype,
    Home,
    JoinText,
    ListenOption,
    ThreadsOption,
    VllmPythonOption,
)

EXIT_CODES = "Exit codes: 0 a node can work here, 1 a check failed, 2 wrong usage."


def doctor(
    join_string: JoinText = "",
    home: Home = DEFAULT_HOME,
    machine: Annotated[bool, typer.Option("--machine", help="Check only this machine, without a round.")] = False,
    listen: ListenOption = "",
    threads: ThreadsOption = 0,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = EngineDtype.AUTO,
    vllm_python: VllmPythonOption = "",
    engines: Annotated[bool, typer.Option(help="Start each engine and sample a tiny model.")] = True,
    bundle: Annotated[
        Path | None, typer.Option(help="Write a zip file with the results, without secrets, for a support request.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check GPU, memory, disk, network, clock and engines; print cause, evidence and next step of each problem.

    Each check ends in ok, warn, fail or skip. Before a node has joined a round, only the machine is checked, unless a
    join string is given. Of several joined rounds, the first is checked whole, the others for an answer and earnings.
    Nothing is registered, and nothing is left behind. Read the file that --bundle writes before you send it.
    """
    import trio

    from protocol.errors import ConfigInvalid
    from swarm_node.allowance import settings
    from swarm_node.coordinator_api import last_round
    from swarm_node.doctor import bundle as bundling
    from swarm_node.doctor import report
    from swarm_node.doctor.examine import Patient, examine
    from swarm_node.engine.choose import EngineOptions

    logs.to_stderr(quiet=True)
    if bundle is not None and bundle.exists():
        raise ConfigInvalid(f"{bundle} exists already.", hint="Choose another file.")
    if machine and join_string:
        raise ConfigInvalid("--machine checks no round.", hint="Leave out the join string, or --machine.")
    asked = bool(join_string) or last_round.find_last(home) is not None
    joins = last_round.all_chosen(join_string, home) if asked and not machine else []
    kept = settings.read(home)
    options = EngineOptions(
        kept.threads or threads, device.value, dtype.value, -1, vllm_python, kept.vram_share, kept.turns_mib
    )
    patient = Patient(home, joins[0] if joins else None, listen, options, engines, tuple(joins[1:]))

    def show(finding: report.CheckResult) -> None:
        if not as_json:
            typer.echo("\n".join(report.lines(finding)))

    findings = trio.run(examine, patient, show)
    if bundle is not None:
        bundling.write(bundle, home, findings, joins=joins)
    if as_json:
        typer.echo(
            json.dumps({"failed": report.failed(findings), "findings": [finding.to_json() for finding in findings]})
        )
    else:
        typer.echo(report.summary(findings))
        if bundle is not None:
            typer.echo(f"{bundle}: check its contents before you share it.")
    raise typer.Exit(1 if report.failed(findings) else 0)
