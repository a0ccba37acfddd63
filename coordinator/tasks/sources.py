"""Rows of problems from their source: files of JSON or Parquet, folders in the hub's layout, and the hub itself.

- A folder has splits in the hub's layout: files with the split's name as a word, like `data/train-00000.parquet`. If no
  file names a split, the whole folder is training data.
- An error in a row names its file and line. It is returned in place of the row, and all are raised together at the end.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol import limits
from protocol.errors import ConfigInvalid

HUB = "hf://"
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet")
NAMES = {"train": ("train",), "held_out": ("held_out", "test", "eval", "validation", "valid", "dev")}
"""The names of a split's files; the first name that exists is used."""

ROW_MAX_BYTES = 4 * limits.MIB
"""The longest line; a longer one means that the file has another format."""

ROWS_AT_ONCE = 1000

BAD_ROWS_SHOWN = 10
"""The unusable rows that an error names; it counts all."""

Row = dict[str, Any]


@dataclass
class BadRows:
    """The rows of a source that cannot be used as problems."""

    count: int = 0
    first: list[ConfigInvalid] = field(default_factory=list)

    def add(self, error: ConfigInvalid) -> None:
        self.count += 1
        if self.count <= BAD_ROWS_SHOWN:
            self.first.append(error)

    def require_none(self) -> None:
        """Raise the error of the only row, or one that names the first rows."""
        if self.count == 1:
            raise self.first[0]
        if self.count:
            shown = "\n".join(f"  {error.message}" for error in self.first)
            some = f" The first {BAD_ROWS_SHOWN}:" if self.count > BAD_ROWS_SHOWN else ""
            hints = dict.fromkeys(error.hint for error in self.first if error.hint)
            raise ConfigInvalid(f"{self.count:,} rows cannot be used as problems.{some}\n{shown}", hint=" ".join(hints))


def files(place: str, split: str, *, revision: str = "") -> list[Path]:
    """Return the files of a split; none if a folder has no files of that name."""
    root = _downloaded(place, revision) if place.startswith(HUB) else Path(place)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigInvalid(f"There is no file or folder {place}.", hint="Paths are relative to the current folder.")
    paths = sorted(path for path in root.rglob("*") if path.suffix in ENDINGS and not _hidden(path, root))
    paths = [path for path in paths if path.name not in ("dataset_info.json", "dataset_infos.json", "state.json")]
    if not paths:
        raise ConfigInvalid(f"{place} has no problem files.", hint=f"Their names end in {', '.join(ENDINGS)}.")
    named = {name: [path for path in paths if _is_of(path.relative_to(root), name)] for name in sum(NAMES.values(), ())}
    for name in NAMES[split]:
        if named[name]:
            return named[name]
    return paths if split == "train" and not any(named.values()) else []


def numbered_rows(path: Path) -> Iterator[tuple[int, Row | ConfigInvalid]]:
    """Yield each row, or its error, with the number of its line, or of its place in a list or table."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet(path), 1)
    elif path.suffix == ".json":
        yield from _array(path)
    elif path.suffix in ENDINGS:
        yield from _lines(path)
    else:
        raise ConfigInvalid(f"{path} has an unknown format.", hint=f"Use one of {', '.join(ENDINGS)}.")


def _lines(path: Path) -> Iterator[tuple[int, Row | ConfigInvalid]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(ROW_MAX_BYTES + 1), b""), 1):
            if len(line) > ROW_MAX_BYTES:
                raise ConfigInvalid(f"{path}:{number} is longer than {ROW_MAX_BYTES} bytes.")
            if line.strip():
                yield number, _object(line.rstrip(), f"{path}:{number}")


def _array(path: Path) -> Iterator[tuple[int, Row | ConfigInvalid]]:
    """Yield the objects of a JSON list; or those of its lines, since many such files contain lines."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"["):
        yield from _lines(path)
        return
    try:
        values = json.loads(data)
    except ValueError as error:
        raise ConfigInvalid(f"{path} is not JSON: {error}.") from None
    for number, value in enumerate(values, 1):
        is_row = isinstance(value, dict)
        yield number, value if is_row else ConfigInvalid(f"{path}: item {number} is not an object.")


def _object(data: bytes, where: str) -> Row | ConfigInvalid:
    """Return the object in a line, or the error if there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        return ConfigInvalid(f"{where} is not JSON: {error}.", hint="Each line is one JSON object.")
    if not isinstance(value, dict):
        return ConfigInvalid(f"{where} is not a JSON object.", hint='Rows look like {"prompt": "…", "answer": "…"}.')
    return value


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ConfigInvalid(f"{path} needs a Parquet reader.", hint="pip install 'echo-swarm[data]'") from None
    with duckdb.connect() as connection:
        try:
            result = connection.execute("SELECT * FROM read_parquet(?)", [str(path)])
            names = [column[0] for column in result.description or ()]
            while several := result.fetchmany(ROWS_AT_ONCE):
                yield from (dict(zip(names, row, strict=True)) for row in several)
        except duckdb.Error as error:
            raise ConfigInvalid(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from None


def _is_of(path: Path, name: str) -> bool:
    return re.search(rf"(^|[^a-z]){name}([^a-z]|$)", str(path).lower()) is not None


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _downloaded(place: str, revision: str) -> Path:
    """Return a folder of the hub's cache for `hf://owner/name`, or for a folder in that repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = place.removeprefix(HUB).partition("/")
    name, _, folder = rest.partition("/")
    wanted = [f"{folder}/*{ending}" if folder else f"*{ending}" for ending in ENDINGS]
    try:
        found = snapshot_download(
            f"{owner}/{name}", repo_type="dataset", revision=revision or None, allow_patterns=wanted
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigInvalid(
            f"{place} cannot be downloaded: {reason}",
            hint="Gated data needs HF_TOKEN; with HF_HUB_OFFLINE=1 only the cache is used.",
        ) from error
    return Path(found) / folder
