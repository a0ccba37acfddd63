"""`swarm-coordinator config`: check, show and explain a round's settings, without starting anything."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import AsJson, ConfigFile, Settings
from coordinator.config import fixed, load, manual
from protocol.errors import ConfigInvalid
from protocol.text.commands import lesson
from protocol.text.plain import counted

app = typer.Typer(help="Check and explain a round's settings.", no_args_is_help=True, add_completion=False)

EXIT_CODES = "Exit codes: 0 valid, 2 a setting is wrong."


@app.command(
    epilog=lesson(
        "swarm-coordinator config check round.toml --set staleness.max_updates=6",
        "`plan` shows how many nodes these settings need.",
        EXIT_CODES,
    )
)
def check(config_file: ConfigFile, settings: Settings, as_json: AsJson = False) -> None:
    """Check the settings, the files that they name, the round in their folder, and the ports. Starts nothing.

    Prints every mistake with its line, what is allowed and what to do, and warnings. If the round was launched before,
    also the settings that cannot change any more.
    """
    from coordinator.commands import checks
    from coordinator.config import reading

    config, wrong = reading.load_checked(config_file, settings)
    warned = manual.warnings(config) if config and not wrong else []
    if config is not None:
        wrong += checks.find_mistakes(config, left_out=[each.path for each in wrong])
        warned += checks.left_to_the_hub(config)
    rows = reading.with_places(wrong, config_file, settings)
    if as_json:
        found = [
            {"place": place, "setting": each.path, "message": each.message, "hint": each.hint} for place, each in rows
        ]
        typer.echo(json.dumps({"mistakes": found, "warnings": warned}))
        raise typer.Exit(2 if wrong else 0)
    for line in warned:
        typer.echo(f"warning: {line}")
    for place, each in rows:
        typer.echo(f"{place}: {each.message}" + (f"\n    {each.hint}" if each.hint else ""))
    if wrong:
        raise ConfigInvalid(
            f"{config_file} has {counted(len(wrong), 'mistake')}.",
            hint="Correct what is listed, and check again.",
        )
    folder = config.round.directory if config else None
    launched = folder is not None and fixed.was_launched(folder)
    typer.echo(
        f"{config_file} is valid" + (f" for the round in {folder}, which was launched before." if launched else ".")
    )


@app.command(
    epilog=lesson("swarm-coordinator config show round.toml", "`config explain` describes each of them.", EXIT_CODES)
)
def show(
    config_file: ConfigFile,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print all keys as JSON.")] = False,
) -> None:
    """Show the settings that differ from the defaults, or all settings as JSON."""
    config = load(config_file, settings)
    if as_json:
        typer.echo(json.dumps(config.model_dump(mode="json"), indent=2))
        return
    for key in manual.every():
        if getattr(getattr(config, key.section), key.name) != key.default:
            typer.echo(manual.explain(config, key.path)[0])


@app.command(
    epilog=lesson(
        "swarm-coordinator config explain round.toml --only staleness",
        "change it in the file, or for one run with --set staleness.max_updates=6.",
        EXIT_CODES,
    )
)
def explain(
    settings: Settings,
    config_file: Annotated[
        Path | None,
        typer.Argument(metavar="ROUND.toml", help="The round's TOML file; without it, the defaults are shown."),
    ] = None,
    only: Annotated[str, typer.Option(help="A section, or one key as section.key.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all keys as a Markdown table.")] = False,
) -> None:
    """Print every setting with its value, default, unit, bounds and meaning, and derived figures.

    The last lines are derived from the settings: the tokens and the maximum cost of an update, the updates that the
    budget covers, the groups in progress, and the groups in escrow.
    """
    if markdown:
        typer.echo(manual.table(), nl=False)
        return
    if config_file and not config_file.exists() and any(manual.every(f"{config_file}")):
        raise ConfigInvalid(f"{config_file} is a setting, not a file.", hint=f"Use --only {config_file}.")
    config = load(config_file, settings)
    lines = manual.explain(config, only)
    if not lines:
        raise ConfigInvalid(
            f"There is no section or setting {only}.", hint=f"Sections: {', '.join(manual.sections())}."
        )
    for line in lines if only else [*lines, "", *manual.effects(config)]:
        typer.echo(line)
