"""`swarm-coordinator api-keys`, typed against the store of a round."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.base.clock import now_ms
from coordinator.cli import app
from coordinator.store.state import Database
from coordinator.transactions import api_keys
from coordinator.transactions.api_keys import KeyUsage
from protocol.limits import DAY_MS
from protocol.text.money import CREDITS

ROUND_FILE = str(Path(__file__).parents[3] / "examples" / "demo.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = CliRunner().invoke(app, ["init", ROUND_FILE, "--set", f"round.directory={tmp_path / 'round'}"])
    assert made.exit_code == 0, made.output
    return tmp_path / "round"


def say(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["api-keys", words[0], ROUND_FILE, *words[1:], "--set", f"round.directory={folder}"])


def test_the_list_shows_what_each_key_has_used_and_what_is_left(folder: Path) -> None:
    assert say(folder, "list").output == "There are no keys yet: make one with `swarm-coordinator api-keys create`.\n"
    created = say(folder, "create", "suite", "--budget", "5000000").output
    assert created.startswith("key  es-")
    assert "\nbudget  5.00 credits\n" in created
    assert "\nIts usage: http://127.0.0.1:8700/usage," in created
    assert "key  es-" in say(folder, "create", "other", "--budget", "10", "--days", "2").output
    database = Database(folder / "state.db")
    database.run_now(api_keys.charge, 1, KeyUsage(1208, 9000, 402_113, 1_000_000), answered_ms=now_ms())
    database.close()
    assert say(folder, "list").output.splitlines()[0].endswith("0 open, last use not known"), "as after a migration"
    database = Database(folder / "state.db")
    database.run_now(api_keys.reserve, 1, 0, CREDITS, now_ms=now_ms() - 3 * 3_600_000)
    database.close()
    first, second = say(folder, "list").output.splitlines()
    assert first.endswith(
        "spent 1.00 credits of 5.00 credits, 4.00 credits left; 1,208 answered queries, 402,113 tokens, 0 open, "
        "used 3\u202fh ago"
    )
    assert first.split()[:2] == ["suite", "valid"]
    assert "valid until" in second
    assert second.endswith("0 answered queries, 0 tokens, 0 open, never used")
    rows = json.loads(say(folder, "list", "--json").output)
    assert [(row["name"], row["answered_queries"], row["tokens"], row["left_micros"]) for row in rows] == [
        ("suite", 1208, 402_113, 4_000_000),
        ("other", 0, 0, 10),
    ]
    assert not [row for row in rows if {"digest", "number"} & row.keys()]
    say(folder, "revoke", "suite")
    assert say(folder, "list").output.splitlines()[0].split()[1] == "revoked"


def test_a_budget_above_that_of_the_round_is_pointed_out(folder: Path) -> None:
    huge = say(folder, "create", "huge", "--budget", "5000000000000")
    assert "warning: the whole round's budget is 1,000.00 credits; --budget is in millionths." in huge.stderr


def test_usage_lists_the_days_of_a_key_or_of_all(folder: Path) -> None:
    moment_ms = now_ms()
    today, before = (
        f"{datetime.fromtimestamp(moment / 1000, UTC):%Y-%m-%d}" for moment in (moment_ms, moment_ms - DAY_MS)
    )
    for name in ("suite", "other"):
        say(folder, "create", name, "--budget", "5000000")
    assert say(folder, "usage").output == "No query was answered in the last 30 days.\n"
    database = Database(folder / "state.db")
    database.run_now(api_keys.charge, 1, KeyUsage(1208, 9000, 402_113, 1_000_000), answered_ms=moment_ms)
    database.run_now(api_keys.charge, 1, KeyUsage(1, 2, 3, 4), answered_ms=moment_ms - DAY_MS)
    database.run_now(api_keys.charge, 2, KeyUsage(1, 2, 3, 0), answered_ms=moment_ms)
    database.close()
    assert [line.split() for line in say(folder, "usage", "suite").output.splitlines()] == [
        f"{before} 1 answered query, 2 tokens in, 3 out, 0.000004 credits".split(),
        f"{today} 1,208 answered queries, 9,000 tokens in, 402,113 out, 1.00 credits".split(),
    ]
    rows = json.loads(say(folder, "usage", "--days", "1", "--json").output)
    assert rows == [
        {"day": today, "answered_queries": 1209, "prompt_tokens": 9002, "tokens": 402_116, "spent_micros": 1_000_000}
    ]
    unknown = say(folder, "usage", "nobody")
    assert unknown.exit_code != 0
    assert "There is no key 'nobody'" in str(unknown.exception)
    assert say(folder, "usage", "--days", "0").exit_code == 2
