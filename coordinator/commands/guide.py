"""Questions for a new round's settings: the few that only its operator can know.

- Each question has the default of the settings model; Enter accepts it. After a wrong answer, the question is repeated.
- Settings given with `--set` are not asked for.
- Answers are checked one by one and together, by the models that will read the file and by this machine's files.
"""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.commands import options
from coordinator.config import parse
from coordinator.config.manual import every
from coordinator.config.reading import with_settings
from coordinator.tasks.kinds import FROM_FILES, KNOWN
from protocol.errors import SwarmError


@dataclass(frozen=True)
class Question:
    """A setting, and the text of its question."""

    path: str
    text: str
    required: bool = False


QUESTIONS = (
    Question("round.directory", "Folder for keys, database and checkpoints"),
    Question("task.name", f"Task: {', '.join(KNOWN)}, or a my_task.py"),
    Question("model.path", "Model: a folder, hf://owner/name, or 'embedded' for the tiny built-in one"),
    Question("staleness.max_updates", "S: maximum staleness of a rollout, in updates"),
    Question("market.budget_micros", "Budget in micro-units, deposited once as the spending limit"),
    Question("market.max_price_micros_per_mtok", "Maximum price you pay, in micro-units per million tokens"),
    Question("round.listen", "Address (host:port) of the API and the leaderboard"),
    Question("round.public_url", "URL at which nodes reach it (empty: the address above)"),
    Question("round.seeder", "Address (host:port) of the seeder, which serves chunks"),
)

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
    while True:
        said = prompt(question.text, default).strip()
        setting = f"{question.path}={said}"
        if said == default and not question.required:
            return []
        if not said:
            complain("This setting has no default; a value is required.")
            continue
        try:
            options.require(parse(with_settings({}, [*before, setting])))
        except SwarmError as error:
            complain(str(error))
        else:
            return [setting]


def _task(settings: list[str]) -> str:
    table = with_settings({}, settings)
    return str(table.get("task", {}).get("name", ""))
