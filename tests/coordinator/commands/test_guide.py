"""A new round's file: asked for, checked answer by answer, written once, and read as what was chosen."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.commands import init
from coordinator.config import load
from coordinator.config.reading import parse, with_settings
from coordinator.tasks.kinds import KNOWN
from protocol.errors import ConfigInvalid, SwarmError


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.fixture
def problems(tmp_path: Path) -> str:
    """The setting that names a file of them."""
    (tmp_path / "p.jsonl").touch()
    return f"data.train={tmp_path / 'p.jsonl'}"


class Operator:
    """Answers by the beginning of the question, one after the other; else takes the default."""

    def __init__(self, **answers: list[str]) -> None:
        self._answers = answers
        self.asked: list[str] = []
        self.told: list[str] = []

    def prompt(self, text: str, default: str) -> str:
        self.asked.append(text)
        word = text.split()[0].strip(":,")
        return self._answers[word].pop(0) if self._answers.get(word) else default

    def run(self, *given: str) -> list[str]:
        return init.ask(list(given), self.prompt, self.told.append)


def test_enter_takes_every_default() -> None:
    operator = Operator()
    assert operator.run() == []
    assert len(operator.asked) == len(init.QUESTIONS)


def test_what_was_given_is_not_asked_for(problems: str) -> None:
    operator = Operator(Maximum=["0.000007"])
    assert operator.run("task.name=math", problems, "staleness.max_updates=2") == [
        "task.name=math", problems, "staleness.max_updates=2", "market.max_price_micros_per_mtok=7",
    ]  # fmt: skip
    assert not [text for text in operator.asked if text.startswith(("Task", "S,", "Problems"))]


@pytest.mark.parametrize(
    ("question", "wrong", "right"),
    [
        ("Task", ["poker", "mine.py"], "task.name=holdem"),
        ("Model", ["nowhere", "."], "model.path=hf://owner/name"),
        ("Address", ["abc", "127.0.0.1:80000"], "round.listen=[::]:8700"),
    ],
)
def test_a_wrong_answer_is_asked_for_again(question: str, wrong: list[str], right: str, elsewhere: Path) -> None:
    _, _, answer = right.partition("=")
    operator = Operator(**{question: [*wrong, answer]})
    assert operator.run() == [right]
    assert len(operator.told) == len(wrong)
    assert len(operator.asked) == len(init.QUESTIONS) + len(wrong)


def test_amounts_are_asked_for_in_the_rounds_unit() -> None:
    operator = Operator(Budget=["much", "-1", "0.0000005", "inf", "12.5"])
    assert operator.run() == ["market.budget_micros=12500000"]
    assert len(operator.told) == 4
    assert Operator(Budget=["1000.0"]).run() == [], "the default"


@pytest.mark.parametrize("said", ["1,5", "-1", "nan", "1e30", "1e4400", "1e999999999", "1.0000001", "9" * 29 + ".1"])
def test_what_is_no_amount_is_asked_for_again_in_the_rounds_unit(said: str) -> None:
    operator = Operator(Budget=[said, "2"])
    assert operator.run() == ["market.budget_micros=2000000"]
    (told,) = operator.told
    assert "six decimals" in told
    assert "millionths" not in told


def test_a_question_names_the_unit_that_was_set() -> None:
    operator = Operator()
    operator.run("round.unit=EUR")
    assert [text for text in operator.asked if "credits" in text] == []
    assert sum("in EUR" in text for text in operator.asked) == 2


@pytest.mark.parametrize("title", ["2026", "true", "1.5 # draft", 'My "round"', "[new]"])
def test_every_title_is_text(title: str) -> None:
    assert parse(with_settings({}, Operator(Title=[title]).run())).round.title == title


def test_every_task_there_is_can_be_chosen() -> None:
    (question,) = (question for question in init.QUESTIONS if question.path == "task.name")
    assert all(name in question.text for name in KNOWN)


def test_a_task_with_data_must_have_some(problems: str) -> None:
    path = problems.partition("=")[2]
    operator = Operator(Task=["data"], Problems=["", "nowhere.jsonl", path])
    assert operator.run() == ["task.name=data", problems]
    assert operator.told[0] == "This setting has no default; a value is required."
    assert "nowhere.jsonl does not exist" in operator.told[1]


def test_a_new_file_explains_itself_and_the_join_string_is_all_of_stdout(elsewhere: Path) -> None:
    chosen = ["--set", "sampling.max_new_tokens=16", "--set", 'round.public_url=https://a"b\\c']
    made = CliRunner().invoke(cli.app, ["init", "new.toml", "--yes", *chosen])
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith('https://a"b\\c#')
    assert made.stdout.count("\n") == 1
    assert "root.pem" in made.stderr
    text = (elsewhere / "new.toml").read_text()
    assert tomllib.loads(text)["sampling"] == {"max_new_tokens": 16}
    assert "# maximum number of tokens of a completion" in text
    assert (elsewhere / "round" / "keys" / "root.pem").exists()

    (elsewhere / "new.toml").write_text(text + "# mine\n")
    again = CliRunner().invoke(cli.app, ["init", "new.toml", "--yes"])
    assert (again.stdout, again.stderr) == (made.stdout, "")
    assert (elsewhere / "new.toml").read_text() == text + "# mine\n", "a file that exists is never written"


def test_without_a_terminal_nothing_is_asked_and_nothing_made(elsewhere: Path) -> None:
    result = CliRunner().invoke(cli.app, ["init", "new.toml", "--set", "round.seed=1"], input="\n" * 20)
    assert isinstance(result.exception, ConfigInvalid)
    assert "--yes" in str(result.exception.hint)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("wrong", ["round.sed=1", "round.listen=abc", "task.name=poker", "model.path=nowhere"])
def test_a_wrong_setting_leaves_no_file(wrong: str, elsewhere: Path) -> None:
    result = CliRunner().invoke(cli.app, ["init", "new.toml", "--yes", "--set", wrong])
    assert isinstance(result.exception, SwarmError)
    assert list(elsewhere.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(elsewhere: Path) -> None:
    (elsewhere / "no").touch()
    with pytest.raises(ConfigInvalid, match="Cannot write"):
        init._write(elsewhere / "no" / "new.toml", [])


def test_whatever_is_chosen_is_read_back(elsewhere: Path) -> None:
    rewards = "reward.functions=['a.py:f', 'b.py:g']"
    settings = ["task.name=data", "task.parameters={boxes = 1, free = true}", rewards, "data.suffix=é\t"]
    init._write(elsewhere / "new.toml", settings)
    assert load(elsewhere / "new.toml", []) == load(None, settings)
