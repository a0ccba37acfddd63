"""Groups of options are dataclasses whose fields are options; a file that cannot be used is named without traceback."""

import errno
import os
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from protocol.text.commands import unusable_file, with_option_groups


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


@pytest.mark.parametrize(
    ("file", "words", "says"),
    [
        ("/ro/target", ["export", "round.toml", "/ro/target"], "Cannot use /ro/target: Read-only file system."),
        ("/ro/.target.partial", ["backup", "round.toml", "/ro/target"], "Cannot use /ro/.target.partial"),
        ("/ro", ["--svg=/ro/charts"], "Cannot use /ro: "),
        ("/ro/target/inner", ["--save", "/ro/target"], "Cannot use /ro/target/inner"),
        ("here/x", ["--save", "here"], "Cannot use here/x"),
        ("/lib/module", ["export", "round.toml", "--json", "/ro/target"], ""),
        ("/cwd/below/x", ["--json", "--svg="], ""),
    ],
)
def test_only_files_that_the_command_line_names_are_the_users(file: str, words: list[str], says: str) -> None:
    said = unusable_file(OSError(errno.EROFS, os.strerror(errno.EROFS), file), words, "/cwd")
    assert said.startswith(says)
    assert bool(said) == bool(says)


def test_a_file_of_another_user_is_named_also_if_the_command_line_does_not_name_it() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/var/lib/round/operator.token")
    said = unusable_file(denied, ["status", "round.toml"], "/cwd")
    assert said.startswith("Cannot use /var/lib/round/operator.token: Permission denied. Run the command as the user")


def test_a_broken_disk_and_an_error_without_a_file_keep_their_traceback() -> None:
    assert unusable_file(OSError(errno.EIO, "I/O error", "/ro/x"), ["/ro/x"], "/cwd") == ""
    assert unusable_file(ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ["/ro/x"], "/cwd") == ""
    assert unusable_file(PermissionError(errno.EACCES, "denied"), ["/ro/x"], "/cwd") == ""
