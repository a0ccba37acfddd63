"""A group of options is a dataclass: its fields are options of the command, and the command receives it filled."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from protocol.text.commands import with_option_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="Width in metres.")]
    height: Annotated[float | None, typer.Option(help="Height in metres.")] = None


@dataclass(frozen=True)
class Colour:
    name: Annotated[str, typer.Option("--colour")] = "grey"


received: list[object] = []


@with_option_groups
def paint(wall: Annotated[str, typer.Argument()], *, coats: int = 2, size: Size, colour: Colour) -> None:
    """Paint a wall."""
    received.append((wall, coats, size, colour))


def call(*words: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False)
    app.command()(paint)
    received.clear()
    outcome = CliRunner().invoke(app, words)
    return outcome.exit_code, outcome.output


def test_the_command_receives_its_groups_filled() -> None:
    assert call("north", "--width", "4", "--height", "2.5", "--colour", "red") == (0, "")
    assert received == [("north", 2, Size(4, 2.5), Colour("red"))]


def test_what_is_not_typed_has_the_default_of_its_field() -> None:
    assert call("north", "--width", "4", "--coats", "1") == (0, "")
    assert received == [("north", 1, Size(4), Colour())]


@pytest.mark.parametrize("words", [("north",), ("north", "--width", "0"), ("north", "--width", "4", "--size", "1")])
def test_a_field_without_a_default_is_required_and_checked(words: tuple[str, ...]) -> None:
    code, said = call(*words)
    assert code == 2
    assert "Error" in said
    assert received == []


def test_help_lists_the_options_where_the_group_stands() -> None:
    said = call("--help")[1]
    places = [said.index(word) for word in ("Paint a wall.", "--coats", "Width in metres.", "Height in", "--colour")]
    assert places == sorted(places)
