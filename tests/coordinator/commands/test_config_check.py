"""`config check` names every mistake at once: of the file, of this machine, and of the round in its folder."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import fixed, load, manual, parse, reading
from coordinator.config.reading import OF_OTHER_TRAINERS, line_of
from protocol.errors import ConfigInvalid

WRONG = """[round]
seeed = 3
max_updates = "many"
listen = "nowhere"

[samplng]
temperature = 1

[sampling]
temperature = -9
description = \"\"\"
[learner]
threads = 7
\"\"\"

[staleness]
adaptive = true
[correction]
mode = "none"
[objective]
minibatches = 40
"""


def check(file: Path, *settings: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the place and setting of every mistake, and the messages with hints."""
    words = [word for setting in settings for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["config", "check", str(file), *words, "--json"])
    rows = json.loads(done.stdout)["mistakes"]
    assert done.exit_code == (2 if rows else 0)
    places = [(row["place"].removeprefix(str(file.parent) + "/"), row["setting"]) for row in rows]
    return places, [f"{row['message']} {row['hint']}" for row in rows]


def test_every_mistake_of_a_file_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(WRONG)
    places, said = check(file, "learner.threads=0")
    assert places == [
        ("r.toml:2", "round.seeed"),
        ("r.toml:3", "round.max_updates"),
        ("r.toml:4", "round.listen"),
        ("r.toml:6", "samplng"),
        ("r.toml:10", "sampling.temperature"),
        ("r.toml:11", "sampling.description"),
        ("--set", "learner.threads"),
        ("r.toml", ""),
        ("r.toml", ""),
    ]
    for number, words in enumerate(
        (
            "Did you mean round.seed?",
            "The value is 'many'. Allowed: a whole number, ≥ 1. Default: 1000.",
            "is not host:port",
            "Did you mean sampling?",
            "Allowed: a number",
            "There is no setting",
            "≥ 1",
            "groups (learner.groups_per_update)",
            "staleness.adaptive follows",
        )
    ):
        assert words in said[number], number


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"learner": {"lr": 3e-4}}, "Did you mean learner.learning_rate?"),
        ({"max_updates": 3}, "Did you mean round.max_updates or staleness.max_updates?"),
        ({"round": {"max_new_tokens": 3}}, "Did you mean sampling.max_new_tokens?"),
        ({"training": {"learning_rate": 1e-4}}, "Did you mean learner.learning_rate?"),
        ({"model": "Qwen/Qwen3-0.6B"}, "model is a section, not a value. Write [model]"),
        ({"sampling": {"num_generations": 8}}, "Here this is sampling.samples_per_group."),
        ({"sampling": {"top_p": 0.9}}, "[sampling] has temperature, max_new_tokens, samples_per_group."),
    ],
)
def test_the_setting_that_was_probably_meant_is_named(written: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse(written)
    assert meant in str(refused.value)


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    known = {setting.path for setting in manual.every()}
    named = set(re.findall(r"[a-z]+\.[a-z_]+", " ".join(OF_OTHER_TRAINERS.values())))
    assert len(named) > 15
    assert named <= known
    assert not OF_OTHER_TRAINERS.keys() & {setting.name for setting in manual.every()}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"learner": {"device": "gpu"}}, "Allowed: cpu, cuda or cuda:N"),
        ({"audit": {"device": "gpu"}}, "Allowed: cpu, cuda or cuda:N"),
        ({"round": {"public_url": "swarm.example.org"}}, "is not a URL. For example https://swarm.example.org"),
    ],
)
def test_a_wrong_value_is_refused_with_a_right_one(written: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse(written)
    assert said in str(refused.value)


def test_a_name_on_the_hub_without_its_prefix_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[model]\npath = "Qwen/Qwen3-0.6B"\n[task]\nname = "data"\n[data]\ntrain = "openai/gsm8k"\n')
    _, said = check(file)
    assert "hf://Qwen/Qwen3-0.6B" in said[0]
    assert "hf://openai/gsm8k" in said[1]


def test_a_task_of_files_without_a_file_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[task]\nname = "data"\n')
    assert check(file) == (
        [(f"{file.name}", "data.train")],
        ["Task data needs problems. Set data.train to a file or folder."],
    )


def test_a_contradiction_is_not_made_up_from_a_value_that_was_left_out() -> None:
    table = {"objective": {"minibatches": 40}, "learner": {"groups_per_update": "64 or so"}}
    with pytest.raises(ConfigInvalid) as refused:
        parse(table)
    assert "minibatches" not in str(refused.value)
    assert refused.value.message.startswith("learner.groups_per_update: ")


def test_other_commands_name_all_mistakes_in_one_line_and_where_to_read_more(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(WRONG)
    with pytest.raises(ConfigInvalid) as refused:
        load(file, [])
    assert refused.value.message.startswith("8 settings are wrong. (1) ")
    assert f"config check {file}" in refused.value.hint


@pytest.mark.parametrize(
    ("path", "line"), [("a.b", 2), ("a", 1), ("c.d", 5), ("a.e", 7), ("c.x", 0), ("z", 0), ("", 0), ("a.f.g", 8)]
)
def test_a_line_is_found_without_help_of_the_reader(path: str, line: int) -> None:
    text = '[a]\nb = 1\n\n[ c ]\n"d"=3\n[a]\ne = 2\nf.g = 1\n'
    assert line_of(path, text) == line


def test_missing_files_a_wrong_task_and_a_wrong_model_are_named_together(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[task]\nname = "poker"\n[model]\npath = "nowhere"\n[data]\ntrain = "no.jsonl"\n')
    places, _ = check(file)
    assert places == [("r.toml:2", "task.name"), ("r.toml:4", "model.path"), ("r.toml:6", "data.train")]


def test_settings_that_the_task_would_ignore_are_mistakes(tmp_path: Path) -> None:
    file, data, env = (tmp_path / name for name in ("r.toml", "rows.jsonl", "env.py"))
    data.touch()
    env.write_text("class Environment: ...\n")
    file.write_text(f'[task]\nname = "{env}"\n[data]\ntrain = "{data}"\n')
    places, said = check(file)
    assert places == [("r.toml:4", "data.train")]
    assert "Read that file in `problems(split, seed)`" in said[0]
    file.write_text('[task]\nname = "leduc"\n[reward]\nfunctions = "exact"\n')
    places, said = check(file)
    assert places == [("r.toml:4", "reward.functions")]
    assert "is an environment and gives the reward itself" in said[0]
    file.write_text('[task]\nnme = "data"\n[data]\ntrain = "no.jsonl"\n')
    assert [setting for _, setting in check(file)[0]] == ["task.nme"]


def test_a_missing_file_is_named_beside_a_wrong_setting_and_a_default_in_its_place_is_not(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(
            f'[round]\nlisten = "127.0.0.1:{port}"\nseeder = "nowhere"\n[data]\ntrain = "no.jsonl"\nevl = ""\n'
            "[learner]\nlora_rank = 4\n"
        )
        places, said = check(file)
    assert places == [
        ("r.toml:2", "round.listen"),
        ("r.toml:3", "round.seeder"),
        ("r.toml:5", "data.train"),
        ("r.toml:6", "data.evl"),
        ("r.toml:8", "learner.lora_rank"),
    ]
    assert "The embedded policy is untrained" in said[4]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[model]\npth = "hf://a/b"\n[learner]\nlora_rank = 4\n', "model.pth"),
        ("[model]\npath = 7\n[learner]\nlora_rank = 4\n", "model.path"),
        ("[round]\ndirectory = 7\n", "round.directory"),
        ('[reward]\nfunctions = [7, "no.py:f"]\n', "reward.functions.0"),
    ],
)
def test_what_follows_from_a_wrong_setting_is_not_named_beside_it(tmp_path: Path, text: str, named: str) -> None:
    """The default in its place is not what the operator wants, so what is wrong with it misleads."""
    file = tmp_path / "r.toml"
    file.write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if named == "round.directory" else 0
        places, _ = check(file, "round.seeder=127.0.0.1:0", f"round.listen=127.0.0.1:{port}")
    assert [path for _, path in places] == [named]


def test_settings_that_the_first_launch_fixed_are_all_named(tmp_path: Path) -> None:
    file, folder = tmp_path / "r.toml", tmp_path / "round"
    file.write_text(f'[round]\ndirectory = "{folder}"\nlisten = "127.0.0.1:0"\nseeder = "127.0.0.1:0"\n')
    folder.mkdir()
    (folder / fixed.RESOLVED).write_text(load(file, []).model_dump_json())
    text = file.read_text()
    file.write_text(f"{text}seed = 5\nmax_updates = 3\n[sampling]\ntemperature = 0.5\n")
    places, said = check(file)
    assert places == [("r.toml:5", "round.seed"), ("r.toml:8", "sampling.temperature")]
    assert "round.seed is 5, and the round in" in said[0]
    (folder / fixed.DRAFT).touch()
    assert check(file) == ([], []), "nothing is fixed before the first launch"


def test_a_port_that_another_program_holds_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        file.write_text(f'[round]\nlisten = "127.0.0.1:{port}"\nseeder = "127.0.0.1:{port}"\n')
        places, said = check(file)
    assert places == [("r.toml:2", "round.listen"), ("r.toml:3", "round.seeder")]
    assert "is in use by another program (pid " in said[0]
    assert "is also round.listen" in said[1]


def test_every_fixed_setting_exists_and_is_marked_in_the_file() -> None:
    paths = {key.path for key in manual.every()}
    assert set(fixed.FIXED) <= paths
    assert manual.toml({}).count(f" {manual.MARK}\n") == len(fixed.FIXED)


def test_a_check_ends_however_many_sections_are_wrong() -> None:
    table = {name: {"nothing": 1, "nowhere": 2} for name in manual.sections()} | {"more": 1, "round": 5}
    config, found = reading.checked(table)
    assert config is not None
    assert len(found) == 2 * len(manual.sections())
