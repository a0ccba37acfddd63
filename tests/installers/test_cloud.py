"""Recipes for rented machines, as far as they can be checked without renting one: keys, commands and settings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coordinator.config import load
from tests.tidy.reference import commands_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "installers" / "cloud"
SKYPILOT = {"name", "workdir", "resources", "envs", "setup", "run"}
RESOURCES = {"accelerators", "cpus", "memory", "disk_size", "ports", "use_spot"}


def commands() -> Iterator[list[str]]:
    """Yield every command of ours in the recipes."""
    for path in sorted(FOLDER.iterdir()):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|[\s/])(swarm-(?:coordinator|node) .*)$", line.strip())
            if found and not line.lstrip().startswith(("#", "|")):
                yield shlex.split(found[1])


def test_every_recipe_says_that_it_was_never_run() -> None:
    assert all(re.search(r"never run|were never run", path.read_text()) for path in FOLDER.iterdir())


def test_the_task_of_skypilot_has_keys_that_it_knows_and_a_round_that_exists() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task.keys() == SKYPILOT
    assert task["resources"].keys() == RESOURCES
    assert load(ROOT / task["envs"]["ROUND"], []).learner.lora_rank


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_a_command_has_options_and_settings_that_exist(words: list[str]) -> None:
    command = commands_of(words[0])[" ".join(words[:2])]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
    settings = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    filled = [re.sub(r"\$\w+", "1", each.replace("$host", "203.0.113.7")) for each in settings]
    assert load(None, filled).round.listen


def test_the_ports_are_those_of_the_settings() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    config = load(None, [])
    ports = [int(address.rpartition(":")[2]) for address in (config.round.listen, config.round.seeder)]
    assert task["resources"]["ports"] == ports
