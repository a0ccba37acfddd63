"""`swarm-coordinator init`: create a round's file, if there is none, then its keys, store, deposit and join string.

- The last line on stdout is the join string, for scripts; questions and next steps go to stderr.
- An existing file is read and never written; questions are asked only for a new one.

Questions for a new round's settings: the few that only its operator can know.

- Each question has the default of the settings model; Enter accepts it. After a wrong answer, the question is repeated.
- Settings given with `--set` are not asked for.
- Answers are checked one by one and together, by the models that will read the file and by this machine's files.
"""

import json
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands import checks
from coordinator.commands.options import Settings
from coordinator.config import Config, load, manual, parse
from coordinator.config.manual import every
from coordinator.config.reading import with_settings
from coordinator.tasks.kinds import FROM_FILES, KNOWN
from ledger.entry import DEPOSITS_MAX_MICROS
from protocol.errors import ConfigInvalid, SwarmError
from protocol.policy.phrase import phrase
from protocol.text.money import DEFAULT_NAME, MICROS

MICRO = Decimal("0.000001")


@dataclass(frozen=True)
class Question:
    """A setting, and the text of its question."""

    path: str
    text: str
    required: bool = False
    in_units: bool = False
    """True for an amount that is asked for in the round's unit, and set in its millionths; `text` has {unit}."""
    is_text: bool = False
    """True for a setting that is text, even if it is typed like a number."""

    def value_of(self, said: str) -> str:
        """Return the setting's value for an answer, as TOML; raise `ConfigInvalid` for what is no amount."""
        if said and self.is_text:
            return json.dumps(said, ensure_ascii=False)
        return str(_micros(said)) if said and self.in_units else said

    def shown(self, value: str) -> str:
        """Return a setting's value as the question shows it."""
        return f"{Decimal(value) / MICROS:f}" if self.in_units else value


QUESTIONS = (
    Question("round.title", "Title of the round on its pages and for volunteers (empty: none)", is_text=True),
    Question("round.directory", "Folder for keys, database and checkpoints"),
    Question("task.name", f"Task: {', '.join(KNOWN)}, or a my_task.py"),
    Question("model.path", "Model: a folder, hf://owner/name, or 'embedded' for the tiny built-in one"),
    Question("staleness.max_updates", "S: maximum staleness of a rollout, in updates"),
    Question("market.budget_micros", "Budget in {unit}, deposited once as the spending limit", in_units=True),
    Question(
        "market.max_price_micros_per_mtok", "Maximum price of a million tokens that you pay, in {unit}", in_units=True
    ),
    Question("round.listen", "Address (host:port) of the API and the leaderboard"),
    Question("round.public_url", "URL at which nodes reach it (empty: the address above)"),
    Question("round.seeder", "Address (host:port) of the seeder, which serves chunks"),
)

BEGINNING = ("eval.every=10",)
"""Settings of a new file that differ from the defaults: a round in the open shows a curve of what it learns."""

DATA = Question("data.train", "Problems: a .jsonl, .json or .parquet file, a folder, or hf://owner/name/folder", True)


def ask(given: list[str], prompt: Callable[[str, str], str], complain: Callable[[str], None]) -> list[str]:
    """Ask for the settings not in `given`; return given and answered settings as `section.key=value`."""
    known = {setting.partition("=")[0] for setting in given}
    settings = list(given)
    defaults = {key.path: str(key.default) for key in every()}
    for question in QUESTIONS:
        if question.path not in known:
            settings += _answer(question, defaults[question.path], settings, prompt, complain)
        if question.path == "task.name" and DATA.path not in known and _task(settings) in FROM_FILES:
            settings += _answer(DATA, "", settings, prompt, complain)
    return settings


def _answer(
    question: Question,
    default: str,
    before: list[str],
    prompt: Callable[[str, str], str],
    complain: Callable[[str], None],
) -> list[str]:
    """Ask one question; return the setting if it differs from the default."""
    unit = with_settings({}, before).get("round", {}).get("unit", DEFAULT_NAME)
    text = question.text.format(unit=unit) if question.in_units else question.text
    while True:
        said = prompt(text, question.shown(default) if default else default).strip()
        try:
            setting = f"{question.path}={question.value_of(said)}"
        except SwarmError as error:
            complain(str(error))
            continue
        if setting == f"{question.path}={default}" and not question.required:
            return []
        if not said:
            complain("This setting has no default; a value is required.")
            continue
        try:
            checks.require(parse(with_settings({}, [*before, setting])))
        except SwarmError as error:
            complain(str(error))
        else:
            return [setting]


def _micros(said: str) -> int:
    """Return an amount in millionths; the limits are compared first, because a power of ten can fill the memory."""
    most = DEPOSITS_MAX_MICROS // MICROS
    with suppress(InvalidOperation):  # also the comparison of what is no number
        amount = Decimal(said)
        if 0 <= amount <= most and amount == amount.quantize(MICRO):
            return int(amount.quantize(MICRO) * MICROS)
    raise ConfigInvalid(
        f"{said:.40} is not an amount.",
        hint=f"Write a number from 0 to {most} with at most six decimals, and with a point: 1000 or 0.5.",
    )


def _task(settings: list[str]) -> str:
    table = with_settings({}, settings)
    return str(table.get("task", {}).get("name", ""))


def init(
    config_file: Annotated[
        Path, typer.Argument(metavar="ROUND.toml", help="The round's TOML file; created if it does not exist.")
    ],
    settings: Settings,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask questions: write a new file from --set and the defaults.")
    ] = False,
) -> None:
    """Create a round: keys, database and deposit. Print the join string for its nodes.

    If the file does not exist, `init` asks a few questions and writes it, with an explanation of every setting. Edit
    it as you like until the first `launch`, which fixes the settings marked [fixed].
    Then move keys/root.pem of the round's folder to offline storage: it is needed only to change the other keys.
    """
    from coordinator.service.round import Round

    new = not config_file.exists()
    if new:
        chosen = [*BEGINNING, *(settings if yes else _asked(config_file, settings))]
        checks.require(parse(with_settings({}, chosen)))
        _write(config_file, chosen)
    config = load(config_file, settings)
    round_ = Round(config)
    round_.close()
    if new:
        _say_next(config_file, config, phrase(round_.round_id))
    typer.echo(config.round.join_string(round_.round_id))


def _asked(config_file: Path, settings: list[str]) -> list[str]:
    """Return the settings with the operator's answers."""

    if not sys.stdin.isatty():
        raise ConfigInvalid(
            f"{config_file} does not exist, and there is no terminal to ask for its settings.",
            hint="Use --yes to accept the defaults, and --set to change single settings.",
        )
    checks.require(parse(with_settings({}, settings)))  # before the first question
    typer.echo(
        f"{config_file} does not exist. Answer a few questions; Enter accepts the default in brackets.", err=True
    )
    return ask(
        settings,
        lambda text, default: str(typer.prompt(text, default=default, show_default=bool(default), err=True)),
        lambda text: typer.echo(f"  {text}", err=True),
    )


def _write(path: Path, settings: list[str]) -> None:
    """Write the settings file atomically, after a check that it reads as the chosen settings."""
    from coordinator.base.files import write_durably

    chosen = with_settings({}, settings)
    wanted = parse(chosen)
    text = manual.toml(chosen)
    if parse(tomllib.loads(text)) != wanted:
        raise RuntimeError("the settings file to be written does not match the chosen settings")
    try:
        write_durably(path, text.encode(), public=True)
    except OSError as error:
        raise ConfigInvalid(f"Cannot write {path}: {error.strerror}.") from error
    typer.echo(
        f"Wrote {path}: it lists every setting with its default and its meaning. Edit it before the launch.", err=True
    )


def _say_next(config_file: Path, config: Config, words: str) -> None:
    keys = config.round.directory / "keys"
    for line in manual.warnings(config):
        typer.echo(f"warning: {line}", err=True)
    for line in (
        "Next:",
        f"  1. Move {keys / 'root.pem'} to offline storage: it is needed only to change the other keys.",
        f"  2. Edit {config_file}, and run swarm-coordinator config check {config_file}. The first launch fixes the",
        f"     settings marked {manual.MARK}; round.unit is also in the join string.",
        f"  3. swarm-coordinator plan {config_file} --gpu 4090:1: does the learner fit? --help: nodes and cost.",
        f"  4. swarm-coordinator launch {config_file}",
        "  5. Send participants the join string below; they run `swarm-node join` with it. Those who type only the",
        f"     host compare this phrase, which you publish elsewhere, too: {words}",
    ):
        typer.echo(line, err=True)
