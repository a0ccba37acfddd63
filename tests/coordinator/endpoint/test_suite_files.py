"""Results files of evaluation suites: those that the suites wrote, and damaged, huge, foreign and hostile ones."""

import json
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.endpoint.suite_files import ResultsRefused, read_results, version_of
from coordinator.transactions.suite_runs import SuiteMetric, SuiteRun
from protocol import limits

WRITTEN = Path(__file__).parent / "suite_results"
"""Files as the suites wrote them in `make test-suites`, without paths, the machine's description, and most samples."""

STDERR = 0.1889822365046136
"""The standard error of four right answers to eight problems."""

LM_EVAL: dict[str, Any] = {
    "results": {"sums": {"alias": "sums", "exact_match,none": 0.5, "exact_match_stderr,none": 0.1}},
    "n-samples": {"sums": {"original": 8, "effective": 8}},
    "model_name": "swarm@3",
    "lm_eval_version": "0.4.13",
    "date": 1.5,
}
LOG: dict[str, Any] = {
    "version": 2,
    "status": "success",
    "eval": {"task": "sums", "model": "openai-api/swarm/swarm@3", "eval_id": "x", "packages": {"inspect_ai": "0.3"}},
    "results": {
        "completed_samples": 8,
        "scores": [
            {
                "name": "exact",
                "scored_samples": 7,
                "metrics": {"accuracy": {"value": 0.5}, "stderr": {"value": 0.1}, "std": {"value": 0.4}},
            }
        ],
    },
}
LIGHTEVAL: dict[str, Any] = {
    "config_general": {"model_name": "openai/swarm@3", "start_time": 1.5},
    "results": {"sums|0": {"em": 0.5, "em_stderr": 0.1}, "all": {"em": 0.5, "em_stderr": 0.1}},
    "config_tasks": {"sums|0": {"effective_num_docs": -1}},
}
FORMS = {"lm-eval": LM_EVAL, "inspect-ai": LOG, "lighteval": LIGHTEVAL}


def read(value: Any) -> SuiteRun:
    return read_results(BytesIO(value if isinstance(value, bytes) else json.dumps(value).encode()))


def archive(header: bytes, name: str = "header.json", compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        file.writestr(name, header)
    return made.getvalue()


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("lm-eval", SuiteMetric("sums", "exact_match", 0.5, 0.1, 8)),
        ("inspect-ai", SuiteMetric("sums", "accuracy (exact)", 0.5, 0.1, 7)),
        ("lighteval", SuiteMetric("sums|0", "em", 0.5, 0.1, None)),
    ],
)
def test_each_suite_has_its_own_form(suite: str, expected: SuiteMetric) -> None:
    run = read(FORMS[suite])
    assert (run.suite, run.metrics, version_of(run)) == (suite, (expected,), 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_eval.json", SuiteMetric("sums", "exact_match", 0.5, STDERR, 8)),
        ("inspect.eval", SuiteMetric("sums", "mean (exact)", 0.5, STDERR, 8)),
        ("inspect.json", SuiteMetric("sums", "mean (exact)", 0.5, STDERR, 8)),
        ("lighteval.json", SuiteMetric("sums|0", "em", 0.5, STDERR, None)),
    ],
)
def test_a_file_is_read_as_its_suite_wrote_it(name: str, expected: SuiteMetric) -> None:
    run = read((WRITTEN / name).read_bytes())
    assert (run.metrics, version_of(run)) == ((expected,), 1)
    assert run.release == {"lm_eval.json": "0.4.13", "lighteval.json": ""}.get(name, "0.3.285")


def test_a_log_that_its_suite_wrote_is_the_same_run_in_both_forms() -> None:
    first, second = (read((WRITTEN / name).read_bytes()) for name in ("inspect.eval", "inspect.json"))
    assert first.digest == second.digest


def test_a_filter_of_lm_eval_and_a_second_task_of_lighteval_have_their_names() -> None:
    two = {"sums": {"em,strict": 1, "em_stderr,strict": "N/A", "em,loose": 0.25, "em_stderr,loose": 0.1}}
    found = [(metric.metric, metric.value, metric.stderr) for metric in read(LM_EVAL | {"results": two}).metrics]
    assert found == [("em (strict)", 1.0, None), ("em (loose)", 0.25, 0.1)]
    more = LIGHTEVAL["results"] | {"other|0": {"em": 0.1, "em_stderr": float("nan")}}
    listed = [(metric.task, metric.stderr) for metric in read(LIGHTEVAL | {"results": more}).metrics]
    assert listed == [("sums|0", 0.1), ("all", 0.1), ("other|0", None)]


@pytest.mark.parametrize(
    ("model", "asked", "version"),
    [("swarm@3", 0, 3), ("swarm@3", 3, 3), ("openai-api/swarm/swarm@12", 0, 12), ("swarm", 5, 5)],
)
def test_the_version_comes_from_the_model_or_from_the_operator(model: str, asked: int, version: int) -> None:
    assert version_of(replace(read(LM_EVAL), model=model), asked) == version


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("swarm", 0, "any version may have answered"),
        ("swarm@3", 4, "results of version 3, and --version is 4"),
        ("gpt-9", 0, "of the model gpt-9, not of swarm"),
        ("swarm@", 0, "of the model swarm@, not"),
        ("swarm@" + "9" * 40, 0, "not of swarm"),
        ("swarm@three", 3, "not of swarm"),
    ],
)
def test_results_of_another_model_or_of_no_version_are_refused(model: str, asked: int, said: str) -> None:
    with pytest.raises(ResultsRefused, match=said) as raised:
        version_of(replace(read(LM_EVAL), model=model), asked)
    assert raised.value.hint


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_log_is_the_same_run_as_archive_and_as_json(compression: int) -> None:
    assert read(archive(json.dumps(LOG).encode(), compression=compression)).digest == read(LOG).digest


def test_the_identity_of_a_run_does_not_depend_on_spaces_and_differs_between_runs() -> None:
    assert read(json.dumps(LM_EVAL, indent=4).encode()).digest == read(LM_EVAL).digest
    assert read(LM_EVAL | {"date": 2.5}).digest != read(LM_EVAL).digest


def changed(value: dict[str, Any], *path: str | int, to: Any) -> dict[str, Any]:
    """Return a copy with another value at a path."""
    made = json.loads(json.dumps(value))
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return dict(made)


SCORE = ("results", "scores", 0, "metrics", "accuracy", "value")

REFUSED: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "cut off": (json.dumps(LM_EVAL).encode()[:-20], "not JSON"),
    "lines of samples": (b'{"a": 1}\n{"a": 2}\n', "not JSON: Extra data"),
    "not text": (b"\xff\xfe\x00{", "not JSON"),
    "nested": (b"[" * 100_000, "not JSON"),
    "a list": (b"[]", "no object"),
    "of no suite": ({"results": {}}, "of no suite"),
    "huge": (lambda: b"1" * (limits.SUITE_FILE_MAX_BYTES + 1), "more than"),
    "without a metric": (LM_EVAL | {"results": {"sums": {"alias": "sums"}}}, "no metric"),
    "too many": (
        LM_EVAL | {"results": {"a": {f"m{n},none": 1 for n in range(limits.SUITE_METRICS_MAX + 1)}}},
        "501 metrics",
    ),
    "NaN of lm-eval": (
        changed(LM_EVAL, "results", "sums", "exact_match,none", to=float("nan")),
        "exact_match of the task sums is nan",
    ),
    "infinity of lighteval": (changed(LIGHTEVAL, "results", "sums|0", "em", to=float("inf")), "is inf"),
    "NaN of inspect": (changed(LOG, *SCORE, to=float("nan")), "is nan"),
    "a text as value": (changed(LOG, *SCORE, to="0.5"), "no finite number"),
    "an endless integer": (changed(LOG, *SCORE, to=10**400), "no finite number"),
    "true as value": (changed(LIGHTEVAL, "results", "sums|0", "em", to=True), "no finite number"),
    "another type": (changed(LM_EVAL, "results", to=[]), "one of lm-eval, but its field results"),
    "a failed log": (changed(LOG, "status", to="error"), "its status is error"),
    "an unfinished archive": (archive(b"{}", "_journal/start.json"), "no header.json"),
    "a damaged archive": (archive(json.dumps(LOG).encode())[:-30], "archive is damaged"),
    "a bomb": (lambda: archive(b" " * (limits.SUITE_FILE_MAX_BYTES + 2)), "header.json has more than"),
}
"""Files that are refused, and words of the refusal; those of many megabytes are made when their test runs."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_results_is_refused_with_what_is_wrong(name: str) -> None:
    value, said = REFUSED[name]
    with pytest.raises(ResultsRefused, match=said) as raised:
        read(value() if callable(value) else value)
    assert raised.value.hint
    assert len(str(raised.value)) < 600


def test_a_name_with_control_characters_is_one_line() -> None:
    (metric,) = read(changed(LM_EVAL, "results", to={"a\x1b[2J\nb" * 99: {"m,none": 1}})).metrics
    assert metric.task.isprintable()
    assert len(metric.task) == limits.SUITE_NAME_MAX_CHARS
    assert read(changed(LM_EVAL, "lm_eval_version", to="1\ud800")).release == "1\\ud800"


KEYS = st.sampled_from(["eval", "status", "results", "model_name", "config_general", "scores", "a,none"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


def error_of(data: bytes) -> ResultsRefused | None:
    """Return the named error of a file; None if it can be read."""
    try:
        read(data)
    except ResultsRefused as error:
        return error
    return None


@given(VALUES)
def test_any_json_gives_a_run_or_a_named_error(value: Any) -> None:
    error = error_of(json.dumps(value).encode())
    assert error is None or error.hint


ZSTANDARD = (WRITTEN / "inspect.eval").read_bytes()


@given(st.binary(min_size=1, max_size=200), st.sampled_from(list(FORMS)), st.integers(0, 5000))
def test_any_damage_gives_a_run_or_a_named_error(noise: bytes, suite: str, place: int) -> None:
    for whole in (json.dumps(FORMS[suite]).encode(), archive(json.dumps(LOG).encode()), ZSTANDARD):
        error = error_of(whole[:place] + noise + whole[place + len(noise) :])
        assert error is None or error.hint
