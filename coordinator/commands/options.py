"""Arguments and options that most commands share, and the list of commands that `--help` prints.

The module of a command is imported when the command runs: the list and other commands need not wait for it.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from protocol.errors import ConfigInvalid
from protocol.start import quick_imports

ConfigFile = Annotated[Path, typer.Argument(metavar="ROUND.toml", help="The round's TOML file.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        default_factory=list,
        show_default=False,
        help="Override a setting of the file, as section.key=value; repeatable.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print all data as JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong."


def confirm(question: str) -> None:
    """Ask a question whose answer no ends the command; raise an error if nobody can answer."""
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, or the end of the input
        if sys.stdin.isatty():
            raise
        typer.echo(err=True)  # ends the line of the question
        raise ConfigInvalid(
            "There is no terminal on which to confirm this. Nothing was done.", hint="Add --yes to do it unasked."
        ) from None
    if not agreed:
        raise typer.Abort


@dataclass(frozen=True)
class CommandEntry:
    """A command, or a group of commands, by the module of this package that has it."""

    place: str
    """`module:name` of a function, or of a typer program whose commands are the group."""
    epilog: str = ""

    def load(self, name: str) -> Any:
        """Import the command's module, and return what typer makes of it."""
        module, _, attribute = self.place.partition(":")
        with quick_imports():
            loaded = importlib.import_module(f"coordinator.commands.{module}")
        found: Callable[..., None] | typer.Typer = getattr(loaded, attribute)
        program = typer.Typer(add_completion=False, rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            program.add_typer(found, name=name)
        else:
            program.command(name, epilog=self.epilog)(found)
        return typer.main.get_group(program).commands[name]


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name, in a given order; a lazy one is loaded when it is looked up."""

    def __init__(self, order: list[str], loaded: Mapping[str, Any], lazy: Mapping[str, CommandEntry]) -> None:
        self._order, self._loaded, self._lazy = order, dict(loaded), lazy

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._lazy[name].load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class SectionedGroup(TyperGroup):
    """A program whose `--help` lists its commands by the task that they are for."""

    sections: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Title → command → what it does, in one line."""
    lazy: ClassVar[Mapping[str, CommandEntry]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        order = [name for commands in self.sections.values() for name in commands]
        self.commands = LazyCommands(order, self.commands, self.lazy)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the sections, without loading a command."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list for each section."""
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))
