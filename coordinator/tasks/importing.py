"""The round's own copy of its problems: made once, before the round begins, and never changed after that.

- The source of the problems is read once, in a separate process: files, the hub, a generator, or the operator's
  `my_task.py`. After that the round needs neither the source nor the libraries that read it.
- No prompt occurs twice: of equal ones the first is kept, held-out problems before train problems. So splits have no
  prompt in common.
- If no held-out problems are given, the digest of the prompt chooses them: a tenth, `HELD_OUT_MAX` at most.
- The import lists the longest prompts, so that a launch checks their lengths without reading all problems again.
- `task.json`, with the digest of every file that was read and of the copy, is written last: a copy without it is
  incomplete. If a source has changed since, or the copy was edited, the next start is refused.

Generators make problems: a `my_task.py`, reasoning-gym, and environments.

- A file has a function `problems(split, seed)` that returns rows in the form of a data file, for "train",
  "held_out" and optionally "validation".
- Generators may be endless: `data.size` problems are read, or `GENERATED`.
- Problems of an environment may have the same prompt, if their other columns differ.

The conversion of a row to a problem: the columns of prompt and answer, and the forms of a prompt.

- A prompt is text, or messages `{"role", "content"}`. An answer may have any type; the task gets it as text, and
  rewards get it unchanged.
- All columns except the prompt are passed to rewards, under their own names and in the types of JSON: dates, times in
  ISO 8601, durations as seconds, decimals as text, arrays as lists, bytes as the text that they encode. A column with
  other values, such as pictures, is refused by its name.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from uuid import UUID

from blake3 import blake3

from coordinator.base.files import file_digest, make_folder, write_durably
from coordinator.config import Config, DataSection
from coordinator.tasks import sources
from coordinator.tasks.kinds import ENVIRONMENT_OF_FILE, ENVIRONMENTS, FOLDER, FROM_FILES, NOTE, suffix_of
from coordinator.tasks.problem_file import Book, line
from coordinator.tasks.reward_functions import error_place, load_callable, module
from protocol.errors import ConfigInvalid, SwarmError
from protocol.tasks import BUILT_IN, ChatMessage, Problem, Prompt, Split

PROMPTS = ("prompt", "question", "problem", "input", "instruction")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "target", "label", "output")
"""The usual columns of prompts and answers, if `data.columns` names none; `a.b` is a key in a column, as in verl."""

_NOWHERE = object()


class Columns:
    """The reader of the rows of one source."""

    def __init__(self, settings: DataSection, suffix: str) -> None:
        self._settings, self._suffix = settings, suffix

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        asked, answered = self._place(row, "prompt", PROMPTS), self._place(row, "answer", ANSWERS)
        if asked is None:
            raise ConfigInvalid(
                f"{where} has no prompt: its columns are {', '.join(map(str, row)) or 'none'}.",
                hint='Name the prompt column: data.columns = {prompt = "…"}.',
            )
        value = _at(row, asked, where)
        answer = None if answered is None else _at(row, answered, where)
        columns = {str(name): _column(each, str(name), where) for name, each in row.items() if name != asked}
        if answer is not None:
            columns["answer"] = _column(answer, str(answered), where)
        return Problem(self._prompt(value, where), _text(columns["answer"] if answer is not None else ""), columns)

    def _place(self, row: Mapping[str, Any], what: str, usual: tuple[str, ...]) -> str | None:
        if (chosen := self._settings.columns.get(what)) is not None:
            return chosen
        return next((name for name in usual if not _is_missing(_value_at(row, name))), None)

    def _prompt(self, value: Any, where: str) -> Prompt:
        if callable(getattr(value, "tolist", None)):  # an array of messages, as pandas reads them
            value = value.tolist()
        if isinstance(value, str) and value:
            text = value + self._suffix
            return (ChatMessage("user", text),) if self._settings.chat else text
        if isinstance(value, list) and value and all(map(_is_message, value)):
            messages = [ChatMessage(str(each["role"]), each["content"]) for each in value]
            last = messages[-1]
            return (*messages[:-1], last._replace(content=last.content + self._suffix))
        if value is None or value in ("", []):
            raise ConfigInvalid(f"{where}: the prompt is empty.", hint="Remove the row, or give it a prompt.")
        raise ConfigInvalid(
            f"{where}: the prompt is neither text nor messages, but {json.dumps(value, default=str)[:60]}.",
            hint='Messages look like {"role": "user", "content": "…"}; pictures and tools are not supported.',
        )


def _is_missing(value: Any) -> bool:
    """Return True if there is no value; compared by identity, since an array compares each of its numbers."""
    return value is None or value is _NOWHERE


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), str)


def _at(row: Mapping[str, Any], place: str, where: str) -> Any:
    value = _value_at(row, place)
    if value is _NOWHERE:
        raise ConfigInvalid(
            f"{where} has no column {place}: there are {', '.join(map(str, row))}.", hint="Correct data.columns."
        )
    return value


def _value_at(row: Mapping[str, Any], place: str) -> Any:
    """Return the value at `a.b`: a column of that name, or a key in column `a`."""
    if place in row:
        return row[place]
    value: Any = row
    for part in place.split("."):
        if isinstance(value, str):  # verl keeps some columns as JSON text
            value = _read(value)
        if not isinstance(value, Mapping) or part not in value:
            return _NOWHERE
        value = value[part]
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


class _NotJson(ValueError):
    """A value that JSON does not have; its text says what the value is."""


def _column(value: Any, name: str, where: str) -> Any:
    """Return a column's value in the types of JSON; raise `ConfigInvalid` if that is not possible."""
    try:
        return _plain(value)
    except _NotJson as error:
        raise ConfigInvalid(
            f"{where}: the column {name} contains {error}, which rewards cannot get.",
            hint="Remove the column (`remove_columns` in the library datasets), or make it text, numbers or lists.",
        ) from None


def _plain(value: Any) -> Any:
    """Return the value in the types of JSON."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID | PurePath):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return _decoded(value)
    if callable(getattr(value, "tolist", None)):  # arrays and single numbers of numpy and torch
        return _plain(_in_microseconds(value).tolist())
    raise _NotJson(f"a value of the type {type(value).__name__}")


def _in_microseconds(value: Any) -> Any:
    """Return an array or a number; dates and durations of a finer unit, which numpy lists as integers, in µs."""
    dtype: Any = getattr(value, "dtype", None)
    is_finer = getattr(dtype, "kind", "") in ("M", "m") and dtype.name.endswith(("ns]", "ps]", "fs]", "as]"))
    return value.astype(f"{dtype.kind}8[us]") if is_finer else value


def _decoded(value: bytes | bytearray) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _NotJson(f"{len(value):,} bytes that are no text") from None


GENERATED = 10_000
HELD_OUT_GENERATED = 1_000

PLAYED, HELD_OUT_PLAYED = 2_000, 200
"""Problems of an environment: its first text may cost a call of a server."""

Rows = Iterable[tuple[Split | None, str, sources.Row | ConfigInvalid]]
"""Each row of a source, or its error, with its split, if it has one, and its place."""


@contextmanager
def _errors_of(code: str) -> Iterator[None]:
    """Report an error of the operator's code with its line, without the stack of this process."""
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # the operator's code may raise anything
        said = f"{type(error).__name__}: {error}{error_place(error)}"
        raise ConfigInvalid(f"{code} raised {said}.", hint="Correct that file, and try again.") from error


def _generated(function: Callable[..., Any], split: Split, seed: int, file: str, most: int) -> Iterator[Any]:
    with _errors_of(f"{file}: problems({split!r})"):
        yield from islice(function(split, seed) or (), most)


def of_file(path: Path, config: Config) -> Rows:
    with _errors_of(path.name):
        function = getattr(module(str(path)), "problems", None)
    if not callable(function):
        raise ConfigInvalid(f"{path.name} has no function problems(split, seed).", hint="docs/tasks.md has an example.")
    splits: tuple[Split, ...] = ("held_out", "validation", "train")
    for split in splits:
        most = (config.data.size or GENERATED) if split == "train" else HELD_OUT_GENERATED
        for number, row in enumerate(_generated(function, split, config.round.seed, path.name, most), 1):
            where = f"{path.name}: {split} problem {number}"
            hint = 'Rows look like {"prompt": "…", "answer": "…"}.'
            yield split, where, row if isinstance(row, dict) else ConfigInvalid(f"{where} is not a dict.", hint=hint)


def of_gym(config: Config) -> Rows:
    """Yield rows with the generator, seed and index, from which the reward generates the rest again."""
    from coordinator.environments.gym_answers import open_dataset

    parameters: dict[str, Any] = dict(config.task.parameters)
    name = str(parameters.pop("generator", ""))
    seed = int(parameters.pop("seed", config.round.seed))
    size = config.data.size or GENERATED
    dataset = open_dataset(name, seed, size, parameters)
    for number in range(size):
        entry = dataset[number]
        made = {"generator": name, "seed": seed, "size": size, "index": number, "parameters": parameters}
        yield None, f"{name} {number}", {"prompt": entry["question"], "answer": entry["answer"], **made}


def of_environment(config: Config) -> Rows:
    """Yield rows of an environment that is shipped."""
    kind = ENVIRONMENTS[config.task.name]
    parameters = {**config.task.parameters, **kind.parameters}
    problems_of = load_callable(kind.problems)
    for split in SPLITS:
        size = (config.data.size or PLAYED) if split == "train" else HELD_OUT_PLAYED
        try:
            rows = problems_of(split, config.round.seed, size, **parameters)
            for number, row in enumerate(islice(rows, size), 1):
                yield split, f"{config.task.name}: {split} problem {number}", row
        except TypeError as error:
            raise ConfigInvalid(
                f"{config.task.name} does not accept these parameters: {error}.",
                hint="`swarm-coordinator task list` names them.",
            ) from error


SPLITS: tuple[Split, ...] = ("held_out", "validation", "train")
"""The splits in the order in which they are filled: a prompt in one of them is left out of the next."""

HELD_OUT_MAX, HELD_OUT_SHARE = 1000, 0.1
VALIDATION_MAX, VALIDATION_SHARE = 200, 0.02
KEY_BYTES = 16


LONGEST_KEPT = 200
"""Prompts whose places are kept. Bytes are not tokens, so the longest prompt need not be the first of them."""


class LongPrompt(NamedTuple):
    """The length of a prompt, and its places in the copy and in the source."""

    size_bytes: int
    split: Split
    number: int
    where: str


class ImportIssue(NamedTuple):
    """A problem, and its place in the source."""

    where: str
    problem: Problem


def needs_data(config: Config) -> bool:
    """Return True if the task's problems are not built in."""
    return config.task.name not in BUILT_IN


def make_copy(config: Config, folder: Path) -> dict[str, Any]:
    """Write all problems to a folder; return the content of its note."""
    make_folder(folder)
    paths, plays = _sources(config), _plays(config)
    seen, counts, repeated = set[bytes](), dict[str, int](), 0
    longest: list[LongPrompt] = []
    kept: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for split, issue in _problems(config, paths):
        key = prompt_key(issue.problem, with_columns=plays)
        if key in seen:
            repeated += 1
            continue
        seen.add(key)
        chosen = _place(split, key, kept, config)
        _keep_longest(longest, LongPrompt(prompt_bytes(issue.problem), chosen, len(kept[chosen]), issue.where))
        kept[chosen].append(line(issue.problem))
    if not kept["train"]:
        raise _nothing_to_train_on(config, {split: len(lines) for split, lines in kept.items()}, repeated)
    for split in SPLITS:
        write_durably(folder / f"{split}.jsonl", b"".join(kept[split]))
        counts[split] = len(kept[split])
    note = {
        "sources": {str(path): file_digest(path) for path in paths},
        "digest": copy_digest(folder),
        "problems": counts,
        "repeated": repeated,
        "environment": plays,
        "longest": sorted(longest, reverse=True),
    }
    write_durably(folder / NOTE, json.dumps(note, indent=2).encode())
    return note


def _nothing_to_train_on(config: Config, kept: Mapping[str, int], repeated: int) -> ConfigInvalid:
    """Return the error for a source whose problems, if it has any, are all held out."""
    source = config.data.train or config.task.name
    if not repeated:
        return ConfigInvalid(f"There is no problem to train on in {source}.", hint="Add problems of the split `train`.")
    others = " and ".join(f"{count:,} of {split}" for split, count in kept.items() if count)
    different = sum(kept.values())
    return ConfigInvalid(
        f"There is no problem to train on in {source}: only {different:,} of its {different + repeated:,} problems are "
        f"different, {others}, and no problem is in two splits.",
        hint="There are too few different problems, or each split has the same ones: `problems(split, seed)` must "
        "depend on `split`, and data.train and data.eval must be different files.",
    )


def _keep_longest(longest: list[LongPrompt], prompt: LongPrompt) -> None:
    """Add a prompt to a heap of the longest ones."""
    if len(longest) < LONGEST_KEPT:
        heapq.heappush(longest, prompt)
    else:
        heapq.heappushpop(longest, prompt)


def longest_problems(config: Config) -> Iterator[tuple[str, Problem]]:
    """Yield the problems of a copy that have the longest prompts, with their places in the source, longest first."""
    folder = config.round.directory / FOLDER
    listed = [LongPrompt(*each) for each in json.loads((folder / NOTE).read_text())["longest"]]
    books = {split: Book(folder / f"{split}.jsonl") for split in SPLITS}
    for prompt in listed:
        yield prompt.where, books[prompt.split][prompt.number]


def prompt_bytes(problem: Problem) -> int:
    """Return the bytes of a prompt's text, and of the tools that the policy's chat template may show."""
    prompt, tools = problem.prompt, problem.columns.get("tools")
    texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
    texts += [json.dumps(tools)] if tools else []
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def check_copy(folder: Path) -> dict[str, Any]:
    """Return the note of a finished copy; refuse a copy or a source that has changed."""
    note: dict[str, Any] = json.loads((folder / NOTE).read_text())
    for name, digest in note["sources"].items():
        path = Path(name)
        # A missing source is allowed: the copy is enough. A Python file may be fixed, its problems stay.
        if path.suffix != ".py" and path.is_file() and file_digest(path) != digest:
            raise ConfigInvalid(
                f"{name} has changed since this round was created.",
                hint="Restore the old file, or use another round.directory for the new one.",
            )
    if copy_digest(folder) != note["digest"]:
        raise ConfigInvalid(
            f"The problems in {folder} have changed since this round was created.", hint="Restore them from a backup."
        )
    return note


def copy_digest(folder: Path) -> str:
    """Return the digest of a copy: of all problems in their order."""
    return blake3("".join(file_digest(folder / f"{split}.jsonl") for split in SPLITS).encode()).hexdigest()


def prompt_key(problem: Problem, *, with_columns: bool = False) -> bytes:
    """Return a key that is equal for equal prompts, whatever else differs unless it is `with_columns`."""
    compared = [problem.prompt, problem.columns] if with_columns else problem.prompt
    return blake3(json.dumps(compared, sort_keys=True).encode()).digest(KEY_BYTES)


def problems(config: Config) -> Iterator[tuple[Split | None, ImportIssue]]:
    """Yield every problem, in the order of the source."""
    return _problems(config, _sources(config))


def _sources(config: Config) -> list[Path]:
    """Return the files that are read; only files of this machine, not of the hub's cache, are compared later."""
    name, data = config.task.name, config.data
    if name.endswith(".py"):
        return [Path(name).absolute()]
    if name not in FROM_FILES:
        return []
    if not data.train:
        raise ConfigInvalid(f"Task {name} needs problems.", hint="Set data.train to a file or folder.")
    places = [(data.train, "train"), (data.eval or data.train, "held_out")]
    paths = [path.absolute() for place, split in places for path in sources.files(place, split, revision=data.revision)]
    return list(dict.fromkeys(paths))


def _problems(config: Config, paths: list[Path]) -> Iterator[tuple[Split | None, ImportIssue]]:
    """Yield each problem with its split, or with None if its prompt's digest decides; then raise for bad rows."""
    columns, bad = Columns(config.data, suffix_of(config)), sources.BadRows()
    for split, where, row in _rows(config, paths):
        try:
            if isinstance(row, ConfigInvalid):
                raise row
            problem = columns.problem(row, where)
        except ConfigInvalid as error:
            bad.add(error)
        else:
            yield split, ImportIssue(where, problem)
    bad.require_none()


def _rows(config: Config, paths: list[Path]) -> Rows:
    if config.task.name.endswith(".py"):
        return of_file(paths[0], config)
    if config.task.name in ENVIRONMENTS:
        return of_environment(config)
    return of_data(config) if config.task.name in FROM_FILES else of_gym(config)


def of_data(config: Config) -> Rows:
    """Yield the rows of files, held-out ones first."""
    data = config.data
    held = sources.files(data.eval or data.train, "held_out", revision=data.revision)
    if data.eval and not held:
        held = sources.files(data.eval, "train", revision=data.revision)
    train = sources.files(data.train, "train", revision=data.revision)
    if not data.eval and held == train:
        held = []
    split: Split | None = "train" if held else None
    yield from (("held_out", where, row) for where, row in _numbered(held, 0))
    yield from ((split, where, row) for where, row in _numbered(train, data.size))


def _plays(config: Config) -> bool:
    """Return True if the samples are episodes of an environment; a file may have one."""
    name = config.task.name
    if name in ENVIRONMENTS:
        return True
    if not name.endswith(".py"):
        return False
    with _errors_of(Path(name).name):
        return hasattr(module(str(Path(name).absolute())), ENVIRONMENT_OF_FILE)


def _numbered(paths: list[Path], size: int) -> Iterator[tuple[str, sources.Row | ConfigInvalid]]:
    taken = 0
    for path in paths:
        for number, row in sources.numbered_rows(path):
            if size and taken >= size:
                return
            taken += 1
            yield f"{path.name}:{number}", row


def _place(split: Split | None, key: bytes, kept: dict[Split, list[bytes]], config: Config) -> Split:
    """Return the split of a problem; the digest holds out some of those without a split."""
    if split in ("held_out", "validation") or (split == "train" and config.task.name not in FROM_FILES):
        return split
    share = int.from_bytes(key[:8]) / 2**64
    if split is None and share < HELD_OUT_SHARE and len(kept["held_out"]) < HELD_OUT_MAX:
        return "held_out"
    if HELD_OUT_SHARE <= share < HELD_OUT_SHARE + VALIDATION_SHARE and len(kept["validation"]) < VALIDATION_MAX:
        return "validation"
    return "train"
