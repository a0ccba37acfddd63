"""`swarm-coordinator finish`: end a round whose versions come from a trainer of your own."""

import typer

from coordinator.commands.options import ConfigFile, Settings, Yes, confirm
from coordinator.config import fixed, load
from protocol.errors import Unreachable


def finish(
    config_file: ConfigFile,
    settings: Settings,
    yes: Yes = False,
) -> None:
    """End a round without a learner of its own (learner.external): no node gets work any more.

    What nodes are owed is paid out of escrow once its audits are done; keep the coordinator running until then. A
    finished round cannot be continued. A round that trains ends after its last update by itself.
    """
    from coordinator.commands.asking import ask

    config = load(config_file, settings)
    if fixed.load_resolved(config.round.directory).learner.external and not yes:  # a coordinator with a learner refuses
        confirm("End the round? It cannot be continued.")
    done = ask(config, "POST", "/v1/operator/finish")
    if done is None:
        raise Unreachable("No coordinator runs for this round.", hint="Launch it, so that its last audits are done.")
    typer.echo("The round is finished." if done["changed"] else "The round was finished before.")
