"""`config explain` has every setting with its value and meaning, and a written file has them all."""

import re
import tomllib
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import Config, manual, parse
from protocol.errors import ConfigInvalid


def test_every_setting_is_explained_with_its_value_and_meaning() -> None:
    config = parse({"learner": {"learning_rate": 0.5}})
    said = "\n".join(manual.explain(config))
    assert "learner.learning_rate = 0.5 (default 1e-06)  [> 0, ≤ 1]" in said
    assert "leases.timeout_s = 0.0  [seconds; ≥ 0]" in said
    for key in manual.every():
        assert key.meaning, key.path
        assert f"{key.path} = " in said


def test_what_settings_amount_to_is_computed_from_them() -> None:
    config = parse(
        {
            "learner": {"groups_per_update": 3},
            "sampling": {"samples_per_group": 5, "max_new_tokens": 7},
            "staleness": {"max_updates": 2},
            "market": {"max_price_micros_per_mtok": 1_000_000, "budget_micros": 1050},
        }
    )
    said = " ".join(manual.effects(config))
    assert "A lease lasts for 60 s, and for 60 s if it is for a turn" in said
    assert "3 × 5 = 15 samples, at most 105 tokens" in said
    assert "at most 0.000105 credits; the budget lasts for 10 such updates" in said
    assert "(S + 1) × B = 9 groups" in said
    assert any("budget_micros" in line for line in manual.warnings(config))


def test_a_bonus_for_exact_work_counts_as_cost_and_says_what_it_saves() -> None:
    market = {"max_price_micros_per_mtok": 1_000_000, "exact_bonus": 0.5}
    plain, dearer = (
        " ".join(manual.effects(parse({"market": market | change}))) for change in ({"exact_bonus": 0}, {})
    )
    assert "50.00% more" in dearer
    assert "saves about 1.1%" in dearer  # 0.55 of sampling, of 2 %
    assert "to the bit" not in plain
    costs = [float(said.partition("It costs at most ")[2].partition(" ")[0]) for said in (plain, dearer)]
    assert costs[1] == pytest.approx(1.5 * costs[0])


@pytest.mark.parametrize(
    ("bonus", "audit", "warned"),
    [
        (0.5, {"tolerance": "torch/fp32/cpu"}, True),
        (0.5, {"tolerance": "torch/fp32/cpu", "classes": ["torch/fp32/cpu"]}, False),
        (0.5, {}, False),
        (0.0, {"tolerance": "torch/fp32/cpu"}, False),
    ],
)
def test_a_bonus_that_is_never_paid_is_warned_of(bonus: float, audit: dict[str, Any], warned: bool) -> None:
    config = parse({"market": {"exact_bonus": bonus}, "audit": audit})
    assert any("market.exact_bonus" in line for line in manual.warnings(config)) is warned


REAL = {"model": {"path": "hf://Qwen/Qwen3-4B"}}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, None),  # the embedded policy answers with a number
        (REAL, "sampling.max_new_tokens"),
        (REAL | {"sampling": {"max_new_tokens": 8}}, None),  # chosen
        (REAL | {"sampling": {"max_new_tokens": 9}, "learner": {"device": "cuda"}}, "learner.dtype"),
        (REAL | {"sampling": {"max_new_tokens": 9}, "learner": {"device": "cuda", "dtype": "float32"}}, None),
        (REAL | {"sampling": {"max_new_tokens": 9}, "learner": {"lora_rank": 32}}, "learner.learning_rate"),
        (REAL | {"sampling": {"max_new_tokens": 9}, "learner": {"lora_rank": 32, "learning_rate": 1e-6}}, None),
        (REAL | {"sampling": {"max_new_tokens": 9}, "learner": {"lora_rank": 32, "external": True}}, None),
    ],
    ids=str,
)
def test_defaults_that_do_not_fit_a_real_model_are_warned_of(table: dict[str, Any], named: str | None) -> None:
    """A round fixes the length of its answers at the first launch: 8 tokens of a real model are no answer."""
    market = {"market": {"budget_micros": 10**15}}
    warned = [line.partition(" ")[0] for line in manual.warnings(parse(table | market))]
    assert warned == ([named] if named else [])


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"listen": "0.0.0.0:8700"}, True),  # nodes elsewhere would dial 127.0.0.1:8701
        ({"public_url": "https://swarm.example.org", "seeder": "0.0.0.0:8701"}, True),
        ({"public_url": "https://swarm.example.org", "seeder_public": "swarm.example.org:8701"}, False),
        ({"listen": "0.0.0.0:8700", "seeder": "198.51.100.9:8701"}, False),
        ({}, False),  # a round on this machine alone
    ],
    ids=str,
)
def test_a_seeder_that_nobody_reaches_is_warned_of(settings: dict[str, str], warned: bool) -> None:
    """The operator would not notice without the warning: all bytes then come over the coordinator's HTTP."""
    assert any("seeder_public" in line for line in manual.warnings(parse({"round": settings}))) is warned


def test_a_written_file_says_every_key_and_means_the_defaults() -> None:
    """Every key in it, taken out of its comment, is still the default: the file cannot drift from the models."""
    written = manual.toml({})
    assert parse(tomllib.loads(written)) == Config().with_absolute_folder()
    defaults = "\n".join(line for line in written.splitlines() if not line.endswith(manual.EXAMPLE))
    uncommented = re.sub(r"^# (\w+ = )", r"\1", defaults, flags=re.MULTILINE)
    assert parse(tomllib.loads(uncommented)) == Config().with_absolute_folder()
    for key in manual.every():
        assert f"# {key.name} =" in written, key.path


def test_what_was_chosen_counts_in_a_written_file() -> None:
    written = manual.toml({"round": {"listen": "0.0.0.0:1"}, "publish": {"origins": ("https://a.example/x",)}})
    found = parse(tomllib.loads(written))
    assert found.round.listen == "0.0.0.0:1"
    assert found.publish.origins == ("https://a.example/x",)


def test_an_example_stands_for_what_is_not_set_and_counts_once_it_is_no_comment() -> None:
    section, examples = "", 0
    for line in manual.toml({}).splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if line.endswith(manual.EXAMPLE):
            manual.sections()[section].model_validate(tomllib.loads(line.removeprefix("# ")))
            examples += 1
    assert examples == sum(key.default is None for key in manual.every()) > 10


def test_a_setting_where_the_file_belongs_is_met_with_the_option() -> None:
    for wanted in ("round.listen", "staleness"):
        done = CliRunner().invoke(app, ["config", "explain", wanted])
        assert isinstance(done.exception, ConfigInvalid)
        assert f"--only {wanted}" in done.exception.hint


def test_a_tables_own_tables_are_written_as_they_are_read() -> None:
    arguments = {"enable_thinking": False, "tools": [{"name": "add", "parameters": {"required": ["a", "b"]}}]}
    written = manual.toml({"data": {"template_arguments": arguments}})
    assert tomllib.loads(written)["data"]["template_arguments"] == arguments
    assert parse(tomllib.loads(written)).data.template_arguments == arguments


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"samples_per_group": 64, "max_new_tokens": 8193}},
        {"sampling": {"samples_per_group": 2, "max_new_tokens": 8193}, "eval": {"every": 1, "samples": 64}},
    ],
)
def test_answers_that_fit_into_no_message_are_refused(sections: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ConfigInvalid, match="one message"):
        parse(sections)
    parse(sections | {"sampling": sections["sampling"] | {"max_new_tokens": 8192}})
