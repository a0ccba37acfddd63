"""`eval import`, `eval list --suites` and `eval remove`: what they print, and what the page and the API show then."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from tests.coordinator.endpoint.test_suite_files import LIGHTEVAL, LM_EVAL, LOG, archive, changed
from tests.coordinator.served import SETTINGS, serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round with three versions, its coordinator stopped."""
    made = tmp_path_factory.mktemp("made")

    async def run() -> None:
        async with serve(made) as served:
            for version in (1, 2, 3):
                await served.publish(version, b"weights %d" % version)

    asyncio.run(run())
    (made / "round.toml").write_text("")
    return made


@pytest.fixture(autouse=True)
def emptied(folder: Path) -> Iterator[None]:
    yield
    for run in json.loads(said(folder, "list", "--suites", "--json")):
        said(folder, "remove", str(run["number"]))


def called(folder: Path, command: str, *words: str) -> tuple[int, str]:
    settings = [f"round.directory={folder / 'round'}", *SETTINGS]
    options = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["eval", command, str(folder / "round.toml"), *words, *options])
    return result.exit_code, result.output if result.exception is None else f"{result.output}{result.exception}"


def said(folder: Path, command: str, *words: str) -> str:
    code, text = called(folder, command, *words)
    assert code == 0, text
    return text


def written(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def test_an_import_prints_the_figures_and_again_says_that_nothing_changed(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "results_1.json", LM_EVAL)
    assert said(folder, "import", str(file)) == (
        "run 1, lm-eval 0.4.13, version 3: sums, exact_match: 0.5 ± 0.1 on 8 samples\n"
        f"{file}: imported as run 1, of version 3.\n"
    )
    again = said(folder, "import", str(file)).splitlines()
    assert again[-1] == f"{file}: imported before as run 1, of version 3; nothing changed."
    assert len(json.loads(said(folder, "list", "--suites", "--json"))) == 1


def test_a_folder_is_imported_with_all_that_is_in_it(folder: Path, tmp_path: Path) -> None:
    written(tmp_path, "swarm@3/results_1.json", LM_EVAL)
    written(tmp_path, "swarm@3/samples_1.jsonl", b"{}\n{}\n")
    written(tmp_path, "results/openai/swarm@3/results_2.json", LIGHTEVAL)
    written(tmp_path, "logs/sums.eval", archive(json.dumps(LOG).encode()))
    made = json.loads(said(folder, "import", str(tmp_path), "--json"))
    assert sorted(run["suite"] for run in made) == ["inspect-ai", "lighteval", "lm-eval"]
    assert all(run["is_new"] for run in made)
    assert [run["is_new"] for run in json.loads(said(folder, "import", str(tmp_path), "--json"))] == [False] * 3
    assert said(folder, "list", "--suites").count("\n") == 3
    assert "3 runs of other suites: `eval list --suites`." in said(folder, "list")
    assert said(folder, "list", "--suites", "--version", "2").startswith("Nothing was imported yet")


def test_the_operator_names_the_version_if_the_file_does_not(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "results_1.json", changed(LM_EVAL, "model_name", to="swarm"))
    code, text = called(folder, "import", str(file))
    assert (code, "--version N" in text) == (1, True)
    assert "of version 2." in said(folder, "import", str(file), "--version", "2")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"", "results_1.json: The file is empty."),
        (changed(LM_EVAL, "model_name", to="gpt-9"), "results_1.json: The file has results of the model gpt-9"),
        (changed(LM_EVAL, "model_name", to="swarm@9"), "results_1.json: Version 9 was not published in this round."),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(folder: Path, tmp_path: Path, value: Any, error: str) -> None:
    written(tmp_path, "results_1.json", value)
    code, text = called(folder, "import", str(tmp_path))
    assert (code, error in text) == (1, True), text
    assert said(folder, "list", "--suites").startswith("Nothing was imported yet")


def test_a_place_without_results_is_named(folder: Path, tmp_path: Path) -> None:
    assert "does not exist" in called(folder, "import", str(tmp_path / "none"))[1]
    code, text = called(folder, "import", str(tmp_path))
    assert (code, "has no results file" in text) == (1, True)


def test_the_training_page_and_the_api_show_what_was_imported(folder: Path, tmp_path: Path) -> None:
    told = changed(LM_EVAL, "results", to={"<b>sums": {"em,none": 0.25, "em_stderr,none": 0.125}})
    assert "sums" not in shown(folder)[0]
    said(folder, "import", str(written(tmp_path, "results_1.json", told)))
    page, found = shown(folder)
    part = page.split('id="suites"')[1].split("</section>")[0]
    assert "the swarm did not check them" in part
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd] ?[^>]*>(.*?)</t[hd]>", part)][7:]
    assert cells[:5] == ["lm-eval 0.4.13", "&lt;b&gt;sums", "em", "3", "0.25 ± 0.12"]
    (run,) = found["suites"]
    assert run["results"] == [{"task": "<b>sums", "metric": "em", "value": 0.25, "stderr": 0.125, "samples": None}]
    assert found["evaluations"] == []


def shown(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the training page and `/v1/evaluations` of the round."""

    async def run() -> tuple[str, dict[str, Any]]:
        async with serve(folder) as served:
            page = await (await served.client.get("/training")).text()
            return page, await (await served.client.get("/v1/evaluations")).json()

    return asyncio.run(run())
