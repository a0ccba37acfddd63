"""Commands of both programs: groups of options, the end of a help text, and files that cannot be used.

- A parameter whose type is a dataclass stands for the options that are its fields.
- A field is an option as a parameter would be: its name, its type with `typer.Option` in `Annotated`, its default.
- The options stand where the group stands in the signature; several commands may have the same group.
"""

import errno
import inspect
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_option_groups(command: Command) -> Command:
    """Return the command with every group replaced by its options; a call fills the groups again."""
    signature = inspect.signature(command, eval_str=True)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    options = [option for parameter in signature.parameters.values() for option in _options(parameter)]

    @wraps(command)
    def run(**values: Any) -> None:
        filled = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **filled)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # read by typer
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    kind = parameter.annotation
    if not is_dataclass(kind):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    types = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
     errno.ENAMETOOLONG}
)  # fmt: skip
"""Reasons for which a file or folder that a command line names cannot be read or written."""

FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
"""Reasons for which this user cannot use a file, whoever names it."""


def unusable_file(error: OSError, words: Sequence[str], folder: str) -> str:
    """Return the message about a file that the words of a command line name; empty for any other error.

    The error may name the file, one beside or below it, or a folder above it. Words are relative to `folder`. A file
    that this user may not use need not be named: that of a round belongs to its service's user, for example.
    """
    if error.errno not in UNUSABLE or not isinstance(error.filename, str):
        return ""
    if error.errno in FORBIDDEN:
        return f"Cannot use {error.filename}: {error.strerror}. Run the command as the user who owns it."
    file = posixpath.normpath(posixpath.join(folder, error.filename))
    paths = (word.partition("=")[2] if word.startswith("-") else word for word in words)
    for path in filter(None, paths):
        named = posixpath.normpath(posixpath.join(folder, path))
        is_beside = posixpath.dirname(file) == posixpath.dirname(named)
        if is_beside or file.startswith(f"{named}/") or named.startswith(f"{file}/"):
            return f"Cannot use {error.filename}: {error.strerror}."
    return ""


def lesson(example: str, then: str, codes: str) -> str:
    """Return the end of a help text; empty lines separate its paragraphs, the only breaks that `--help` keeps."""
    return "\n\n".join((f"Example: {example}", f"Then: {then}", codes))
