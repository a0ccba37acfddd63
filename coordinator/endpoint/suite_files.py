"""Results files of evaluation suites: which run they describe, and of which version.

    lm-eval      results_*.json
    inspect-ai   *.eval, an archive of which only `header.json` is read, or the same log as JSON
    lighteval    results_*.json

- The form of a file is recognised by its content. A file that is none of these is refused, with what it lacks.
- A value must be a finite number. A standard error that is none, or no number, counts as not reported.
- Suites name the model that they queried: `swarm@12`, perhaps with the name of a provider before it, is version 12.
"""

import json
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any, BinaryIO, TypeVar
from zipfile import BadZipFile, ZipFile, ZipInfo

import zstandard
from pydantic import BaseModel, Field, ValidationError

from coordinator.endpoint.requests import MODEL, model_version
from coordinator.transactions.suite_runs import SuiteMetric, SuiteRun
from protocol import limits
from protocol.errors import SwarmError
from protocol.text.plain import one_line, size_text

HEADER = "header.json"
"""The part of an archive of inspect-ai that has all but its samples."""

ZIP_ZSTANDARD = 93
"""The compression of these archives, which Python's own reader knows from 3.14 on."""

LOCAL_HEADER_BYTES = 30

DAMAGED = (
    BadZipFile, zstandard.ZstdError, zlib.error, struct.error,
    EOFError, NotImplementedError, OSError, OverflowError, RuntimeError, ValueError,
)  # fmt: skip
"""Errors of the readers of archives, for whatever may be wrong with the bytes: a place before the file's start, too.

`NotImplementedError` is the one for a compression that the reader does not know.
"""

AVERAGES = ("accuracy", "mean")
"""Metrics of inspect-ai whose standard error its metric `stderr` is."""

SPREADS = ("stderr", "bootstrap_stderr", "std", "var")

RERUN = "Run the suite with the model swarm@N, or say which version answered: --version N."

F = TypeVar("F", bound=BaseModel)


class ResultsRefused(SwarmError):
    """A file that has no complete results of an evaluation suite, or those of another model."""

    code, http_status, fault = "results_refused", 422, "operator"


def read_results(file: BinaryIO) -> SuiteRun:
    """Return the run that a results file describes."""
    start = file.read(4)
    file.seek(0)
    data = _header(file) if start == b"PK\x03\x04" else _within(file, limits.SUITE_FILE_MAX_BYTES)
    run = _run(_object(data))
    if not run.metrics:
        raise ResultsRefused("The file has no metric.", hint="Did every sample fail? Look at the suite's own output.")
    if len(run.metrics) > limits.SUITE_METRICS_MAX:
        raise ResultsRefused(
            f"The file has {len(run.metrics):,} metrics; the limit is {limits.SUITE_METRICS_MAX}.",
            hint="Run fewer tasks at once.",
        )
    return run


def version_of(run: SuiteRun, asked: int = 0) -> int:
    """Return the version that a run measured; `asked` is what the operator says, or 0."""
    name = run.model.rpartition("/")[2]
    version = model_version(name)
    if version is None and name != MODEL:
        raise ResultsRefused(f"The file has results of the model {_shown(run.model)}, not of {MODEL}.", hint=RERUN)
    if version is not None and asked not in (0, version):
        raise ResultsRefused(
            f"The file has results of version {version}, and --version is {asked}.", hint="Leave --version out."
        )
    if version is None and not asked:
        raise ResultsRefused(f"The file names the model {MODEL}: any version may have answered.", hint=RERUN)
    return asked if version is None else version


class _SampleCounts(BaseModel):
    effective: int | None = None


class _LmEval(BaseModel):
    """The fields of results_*.json of lm-eval; `metrics` by task, as `metric,filter` and `metric_stderr,filter`."""

    model_name: str
    metrics: dict[str, dict[str, Any]] = Field(alias="results")
    samples: dict[str, _SampleCounts] = Field({}, alias="n-samples")
    release: str = Field("", alias="lm_eval_version")
    date: float | str = ""

    def run(self) -> SuiteRun:
        return SuiteRun("lm-eval", _shown(self.release), self.model_name, str(self.date), tuple(self._metrics()))

    def _metrics(self) -> Iterator[SuiteMetric]:
        for task, values in self.metrics.items():
            for key, value in values.items():
                name, comma, chosen = key.partition(",")
                if not comma or name.endswith("_stderr"):
                    continue
                shown = name if chosen == "none" else f"{name} ({chosen})"
                count = self.samples.get(task, _SampleCounts()).effective
                yield _metric(task, shown, value, values.get(f"{name}_stderr,{chosen}"), count)


class _ModelName(BaseModel):
    model_name: str
    start_time: float | str = ""


class _TaskSize(BaseModel):
    effective_num_docs: int | None = None


class _Lighteval(BaseModel):
    """The fields of results_*.json of lighteval; `metrics` by task, as `metric` and `metric_stderr`."""

    general: _ModelName = Field(alias="config_general")
    metrics: dict[str, dict[str, Any]] = Field(alias="results")
    sizes: dict[str, _TaskSize] = Field({}, alias="config_tasks")

    def run(self) -> SuiteRun:
        return SuiteRun("lighteval", "", self.general.model_name, str(self.general.start_time), tuple(self._metrics()))

    def _metrics(self) -> Iterator[SuiteMetric]:
        for task, values in self.metrics.items():
            if task == "all" and len(self.metrics) <= 2:
                continue  # the average of one task
            for name, value in values.items():
                if not name.endswith("_stderr"):
                    count = self.sizes.get(task, _TaskSize()).effective_num_docs
                    samples = count if count and count > 0 else None  # -1: lighteval did not count them
                    yield _metric(task, name, value, values.get(f"{name}_stderr"), samples)


class _LogMetric(BaseModel):
    value: Any


class _LogScore(BaseModel):
    name: str
    scored_samples: int | None = None
    metrics: dict[str, _LogMetric]


class _LogResults(BaseModel):
    completed_samples: int | None = None
    scores: list[_LogScore] = []


class _LogSpec(BaseModel):
    task: str
    model: str
    eval_id: str = ""
    created: str = ""
    packages: dict[str, str] = {}


class _InspectLog(BaseModel):
    """The fields of a log of inspect-ai, without its samples."""

    status: str
    spec: _LogSpec = Field(alias="eval")
    results: _LogResults | None = None

    def run(self) -> SuiteRun:
        if self.status != "success":
            raise ResultsRefused(
                f"The evaluation did not end well: its status is {_shown(self.status)}.",
                hint="`inspect eval-retry` continues it.",
            )
        spec = self.spec
        identity = spec.eval_id or spec.created
        return SuiteRun(
            "inspect-ai", _shown(spec.packages.get("inspect_ai", "")), spec.model, identity, tuple(self._metrics())
        )

    def _metrics(self) -> Iterator[SuiteMetric]:
        results = self.results or _LogResults()
        for score in results.scores:
            count = results.completed_samples if score.scored_samples is None else score.scored_samples
            stderr = next((score.metrics[name].value for name in SPREADS[:2] if name in score.metrics), None)
            for name, metric in score.metrics.items():
                if name not in SPREADS:
                    own = stderr if name in AVERAGES else None
                    yield _metric(self.spec.task, f"{name} ({score.name})", metric.value, own, count)


def _metric(task: str, name: str, value: Any, stderr: Any, samples: int | None) -> SuiteMetric:
    number = _finite(value)
    if number is None:
        raise ResultsRefused(
            f"{_shown(name)} of the task {_shown(task)} is {_shown(repr(value))}, which is no finite number.",
            hint="Nothing was imported. Repair the task, and run it again.",
        )
    return SuiteMetric(_shown(task), _shown(name), number, _finite(stderr), samples)


def _finite(value: Any) -> float | None:
    """Return a number as a float; None for everything else."""
    if type(value) not in (int, float) or abs(value) > sys.float_info.max or isnan(value):
        return None
    return float(value)


def _shown(text: str) -> str:
    """Return a text of the file on one line, cut to the length of a name."""
    return one_line(text[: limits.SUITE_NAME_MAX_CHARS])[: limits.SUITE_NAME_MAX_CHARS]


def _run(found: Mapping[str, Any]) -> SuiteRun:
    """Return the run in a decoded file, which is in the form of one of the suites."""
    if "eval" in found and "status" in found:
        return _read(_InspectLog, found, "inspect-ai").run()
    if "config_general" in found:
        return _read(_Lighteval, found, "lighteval").run()
    if "results" in found and "model_name" in found:
        return _read(_LmEval, found, "lm-eval").run()
    raise ResultsRefused(
        "The file is of no suite that is known here: lm-eval, inspect-ai and lighteval.",
        hint="lm-eval and lighteval write results_*.json, inspect-ai *.eval.",
    )


def _read(form: type[F], found: Mapping[str, Any], suite: str) -> F:
    try:
        return form.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = _shown(".".join(map(str, first["loc"])))
        raise ResultsRefused(
            f"The file looks like one of {suite}, but its field {place} is wrong: {first['msg']}.",
            hint="Was it changed, or written by a version of the suite that is not known here?",
        ) from None


def _object(data: bytes) -> Mapping[str, Any]:
    if not data.strip():
        raise ResultsRefused("The file is empty.", hint="Did the suite end before it wrote its results?")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "not readable"
        raise ResultsRefused(
            f"The file is not JSON: {reason}.", hint="It is damaged, or not the file with a run's results."
        ) from None
    if not isinstance(found, dict):
        raise ResultsRefused("The file is JSON, but no object.", hint="It is not the file with a run's results.")
    return found


def _within(stream: Any, at_most: int, what: str = "The file") -> bytes:
    data: bytes = stream.read(at_most + 1)
    if len(data) > at_most:
        raise ResultsRefused(
            f"{what} has more than {size_text(at_most)}, the limit for results.",
            hint="Results have no samples: import results_*.json, or the archive (.eval) of inspect-ai.",
        )
    return data


def _header(file: BinaryIO) -> bytes:
    """Return the header in an archive of inspect-ai."""
    try:
        with ZipFile(file) as archive:
            info = archive.getinfo(HEADER)
            stream: Any = _unpacked(file, info) if info.compress_type == ZIP_ZSTANDARD else archive.open(info)
            data = _within(stream, limits.SUITE_FILE_MAX_BYTES, HEADER)
    except KeyError:
        raise ResultsRefused(
            f"The archive has no {HEADER}: the evaluation has not ended, or this is no log of inspect-ai.",
            hint="`inspect eval-retry` continues an evaluation that was interrupted.",
        ) from None
    except DAMAGED as error:
        raise ResultsRefused(f"The archive is damaged: {_shown(str(error))}.", hint="Copy it again.") from None
    if zlib.crc32(data) != info.CRC:
        raise ResultsRefused(f"The archive is damaged: {HEADER} has another checksum.", hint="Copy it again.")
    return data


def _unpacked(file: BinaryIO, info: ZipInfo) -> Any:
    """Return a stream of a file in an archive that is compressed with Zstandard."""
    if info.compress_size > limits.SUITE_FILE_MAX_BYTES:
        raise BadZipFile(f"{info.filename} has {info.compress_size:,} bytes")
    file.seek(info.header_offset)
    start = file.read(LOCAL_HEADER_BYTES)
    if len(start) < LOCAL_HEADER_BYTES:
        raise BadZipFile("it is cut off")
    skipped = int.from_bytes(start[26:28], "little") + int.from_bytes(start[28:30], "little")
    file.seek(info.header_offset + LOCAL_HEADER_BYTES + skipped)
    packed = file.read(info.compress_size)
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
