"""Opening a round: a new folder is furnished once, an old one continues with the settings it was counted with."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from coordinator.app import run
from coordinator.config import load
from coordinator.service import opening
from coordinator.service.round import Round
from coordinator.store.state import Database
from coordinator.transactions.leases import terms_of
from ledger import store
from ledger.book import BookBroken
from protocol.errors import ConfigInvalid, UntrustedRoot
from protocol.policy import root_document
from protocol.text.money import Unit
from tests.coordinator.policy_files import write_policy


def open_round(folder: Path, *settings: str) -> str:
    round_ = Round(load(None, [f"round.directory={folder}", *settings]))
    round_.close()
    return round_.round_id


def test_opening_again_continues_the_same_round(tmp_path: Path) -> None:
    assert open_round(tmp_path) == open_round(tmp_path, "leases.timeout_s=5", "round.max_updates=7")


LEDUC = ("task.name=leduc", "sampling.max_new_tokens=1024")


@pytest.mark.parametrize(
    ("settings", "lease_ms"),
    [
        ([], 60_000),
        (["sampling.max_new_tokens=500"], 60_000),
        ([*LEDUC, "episode.turn_tokens_max=200"], 60_000),
        ([*LEDUC, "episode.turn_tokens_max=900"], 90_000),
        ([*LEDUC, "episode.turn_tokens_max=900", "leases.timeout_s=20"], 20_000),
    ],
)
def test_a_lease_lasts_as_long_as_an_answer_or_a_turn_of_an_episode_may_take(
    tmp_path: Path, settings: list[str], lease_ms: int
) -> None:
    round_ = Round(load(None, [f"round.directory={tmp_path}", *settings]))
    round_.close()
    assert round_.terms.timeout_ms == lease_ms


def test_a_lease_of_long_answers_lasts_long_enough_for_a_slow_card() -> None:
    assert terms_of(load(None, ["sampling.max_new_tokens=4096"])).timeout_ms == 409_600


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("learner.groups_per_update=17", "learner.groups_per_update = 16, not 17"),
        ("sampling.max_new_tokens=9", "sampling.max_new_tokens = 8, not 9"),
        ("market.budget_micros=1", "market.budget_micros = 1000000000, not 1"),
        ("round.unit=EUR", "round.unit = credits, not EUR"),
        ("round.unit_decimals=2", "round.unit_decimals = 4, not 2"),
    ],
)
def test_settings_that_the_history_was_counted_with_cannot_change(tmp_path: Path, setting: str, name: str) -> None:
    open_round(tmp_path)
    opening.mark_launched(tmp_path)
    with pytest.raises(ConfigInvalid, match=name):
        open_round(tmp_path, setting)
    open_round(tmp_path)


COMMITTED = [("commitment:1", 0), ("commitment:2", 0)]
"""The entries of the first epochs of audits."""


def ledger_of(folder: Path) -> list[tuple[str, int]]:
    """Return the effects of all entries, with the amounts of deposits, after a check of the whole ledger."""
    database = Database(folder / "state.db")
    assert database.run_now(store.rebuild) == []
    entries = [recorded.entry for recorded in database.run_now(store.entries, 0, 100)]
    database.close()
    return [(entry.effect, getattr(entry, "amount_micros", 0)) for entry in entries]


@pytest.mark.parametrize(
    "settings",
    [
        ("round.seed=3",),
        ("learner.groups_per_update=17", "sampling.samples_per_group=3", "sampling.temperature=0.5"),
        ("task.name=kuhn",),
        ("learner.lora_rank=4", "learner.external=true"),
    ],
)
def test_before_the_first_launch_every_setting_may_change(tmp_path: Path, settings: tuple[str, ...]) -> None:
    before = open_round(tmp_path)
    assert open_round(tmp_path, *settings) == before, "the join string stays"
    opening.mark_launched(tmp_path)
    open_round(tmp_path, *settings)
    with pytest.raises(ConfigInvalid, match=settings[0].partition("=")[0]):
        open_round(tmp_path)


def test_a_budget_that_is_changed_before_the_first_launch_is_deposited_once(tmp_path: Path) -> None:
    before = open_round(tmp_path)
    assert ledger_of(tmp_path) == [("deposit:opening", 1_000_000_000), ("root:1", 0), *COMMITTED]
    assert open_round(tmp_path, "market.budget_micros=7") == before
    assert ledger_of(tmp_path) == [("deposit:opening", 7), ("root:1", 0), *COMMITTED]
    open_round(tmp_path, "market.budget_micros=0")
    assert ledger_of(tmp_path) == [("root:1", 0), *COMMITTED]


def test_a_unit_that_is_changed_before_the_first_launch_gives_another_join_string(tmp_path: Path) -> None:
    before = open_round(tmp_path)
    after = open_round(tmp_path, "round.unit=EUR", "round.unit_decimals=2")
    assert after != before
    assert root_document.unit_of((tmp_path / "metadata" / "1.root.json").read_bytes()) == Unit("EUR", 2)
    assert ledger_of(tmp_path) == [("deposit:opening", 1_000_000_000), ("root:1", 0), *COMMITTED]
    opening.mark_launched(tmp_path)
    assert open_round(tmp_path, "round.unit=EUR", "round.unit_decimals=2") == after


def test_a_launched_round_does_not_begin_again_in_an_empty_or_damaged_store(tmp_path: Path) -> None:
    """A second log under the same keys would contradict every receipt of the first one."""
    open_round(tmp_path)
    opening.mark_launched(tmp_path)
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(ConfigInvalid, match=r"its store is empty: .*/state\.db") as refused:
            open_round(tmp_path)
        assert "into a new folder" in refused.value.hint
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigInvalid, match=r"state\.db cannot be read: file is not a database"):
        open_round(tmp_path)


def test_a_process_beside_a_launch_that_has_just_begun_is_not_told_of_an_earlier_one(tmp_path: Path) -> None:
    """Both may be started at once on PostgreSQL, whose store is empty until one of them opens it."""
    before = open_round(tmp_path)
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    beside = Round(load(None, [f"round.directory={tmp_path}"]), leads=False)
    beside.close()
    assert beside.round_id == before


def test_problems_that_are_changed_before_the_first_launch_are_copied_again(tmp_path: Path) -> None:
    problems, folder = tmp_path / "p.jsonl", tmp_path / "round"
    settings = ("task.name=data", f"data.train={problems}", "data.eval=", "data.size=0")
    for first in (1, 5):
        rows = range(first, first + 40)
        problems.write_text("".join(f'{{"prompt": "{row}+1=", "answer": "{row + 1}"}}\n' for row in rows))
        open_round(folder, *settings)
        assert f"{first}+1=" in "".join(path.read_text() for path in (folder / "task").iterdir())
    opening.mark_launched(folder)
    problems.unlink()
    open_round(folder, *settings)


def test_a_round_that_was_not_launched_yet_deletes_nothing_of_another_one(tmp_path: Path) -> None:
    open_round(tmp_path / "mine", "market.budget_micros=5")
    open_round(tmp_path / "other", "market.budget_micros=7")
    shutil.copy(tmp_path / "other" / "state.db", tmp_path / "mine" / "state.db")
    for settings in (("market.budget_micros=5",), ("round.unit=EUR",)):
        with pytest.raises(ConfigInvalid, match="belongs to round"):
            open_round(tmp_path / "mine", *settings)
    assert ledger_of(tmp_path / "mine") == [("deposit:opening", 7), ("root:1", 0), *COMMITTED]


def test_a_signed_ledger_cannot_begin_again(tmp_path: Path) -> None:
    round_ = Round(load(None, [f"round.directory={tmp_path}"]))
    asyncio.run(round_.publish_checkpoint())
    round_.close()
    with pytest.raises(BookBroken, match="fork"):
        open_round(tmp_path, "market.budget_micros=7")


def test_the_round_id_pins_the_unit(tmp_path: Path) -> None:
    round_id = open_round(tmp_path, "round.unit=EUR", "round.unit_decimals=2")
    root = (tmp_path / "metadata" / "1.root.json").read_bytes()
    assert root_document.unit_of(root_document.pin(root, round_id).root) == Unit("EUR", 2)
    with pytest.raises(UntrustedRoot):
        root_document.pin(root.replace(b"EUR", b"USD"), round_id)


@pytest.mark.parametrize("name", ["<b>EUR</b>", "EUR\u202e", "9 EUR", "", "a" * 13])
def test_a_unit_that_would_mislead_readers_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"round\.unit: .*a unit is"):
        load(None, [f"round.unit={name}"])


@pytest.mark.parametrize("positions", [16, 8])
def test_a_round_whose_prompts_leave_no_room_for_an_answer_is_refused_before_anything_is_written(
    tmp_path: Path, positions: int
) -> None:
    policy, problems, folder = tmp_path / "policy", tmp_path / "p.jsonl", tmp_path / "runs" / "round"
    write_policy(policy)
    shape = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": positions}))
    short = [f'{{"prompt": "{number}+1=", "answer": "{number + 1}"}}\n' for number in range(40)]
    problems.write_text("".join([*short[:20], '{"prompt": "1234+1234=", "answer": "2468"}\n', *short[20:]]))
    settings = ("task.name=data", f"data.train={problems}", f"model.path={policy}", "sampling.max_new_tokens=8")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigInvalid) as refused:
        open_round(folder, *settings)
    assert "p.jsonl:21" in refused.value.message
    assert f"The prompt has 10 tokens, and at most {positions - 8} are allowed" in refused.value.message
    assert ("Set sampling.max_new_tokens to 6 or less" in refused.value.hint) == (positions == 16)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (policy / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 18}))
    assert open_round(folder, *settings) == open_round(folder, *settings)
    assert {path.name for path in folder.parent.iterdir()} == {"round"}, "the copy aside is gone"


def test_a_built_in_task_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"the model's 512 positions minus sampling\.max_new_tokens = 510"):
        open_round(tmp_path / "round", "sampling.max_new_tokens=510")
    assert not (tmp_path / "round").exists()


def test_secrets_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    open_round(tmp_path)
    secrets = [tmp_path / "operator.token", *(tmp_path / "keys").iterdir()]
    assert len(secrets) == 7
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def others_may_look_into(folder: Path) -> set[str]:
    """The names in a round's folder that other users of the machine can read."""
    return {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077}


def test_a_new_round_shows_others_what_is_served_and_nothing_else(tmp_path: Path) -> None:
    problems, folder = tmp_path / "p.jsonl", tmp_path / "runs" / "round"
    problems.write_text("".join(f'{{"prompt": "{number}+1=", "answer": "{number + 1}"}}\n' for number in range(40)))
    open_round(folder, "task.name=data", f"data.train={problems}")
    assert {"state.db", "task", "coordinator.lock"} <= {path.name for path in folder.iterdir()}
    assert others_may_look_into(folder) == {"public", "metadata", "blobs"}


def test_an_old_round_is_closed_to_others_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_round(tmp_path)
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner").chmod(0o755)  # whatever the umask
    (tmp_path / "state.db").chmod(0o644)
    (tmp_path / "keys").chmod(0o755)
    with caplog.at_level("INFO"):
        open_round(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "other users" in record.getMessage()]
    assert "keys, learner, state.db" in said
    assert others_may_look_into(tmp_path) == {"public", "metadata", "blobs"}
    caplog.clear()
    with caplog.at_level("INFO"):
        open_round(tmp_path)
    assert "other users" not in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "127.0.0.1:http"])
def test_an_address_that_is_none_is_refused_before_the_round_is_made(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"round\.listen: .* is not host:port"):
        load(None, [f"round.directory={tmp_path}", f"round.listen={address}"])


@pytest.mark.asyncio
async def test_an_address_that_cannot_be_listened_on_is_a_named_error(tmp_path: Path) -> None:
    config = load(None, [f"round.directory={tmp_path}", "round.listen=203.0.113.1:8700"])
    with pytest.raises(ConfigInvalid, match="Cannot listen on"):
        await run(config, with_learner=False, with_auditor=False, announce=lambda _: None)


def test_a_second_coordinator_of_the_same_round_is_refused(tmp_path: Path) -> None:
    first = Round(load(None, [f"round.directory={tmp_path}"]))
    with pytest.raises(ConfigInvalid, match="A coordinator is running"):
        open_round(tmp_path)
    first.close()
    open_round(tmp_path)


def test_a_round_never_goes_on_with_other_problems(tmp_path: Path) -> None:
    """A rebuilt copy of another file is rejected, too: the store has the digest of the first one."""
    problems, folder = tmp_path / "p.jsonl", tmp_path / "round"
    rows = [f'{{"prompt": "{number}+1=", "answer": "{number + 1}"}}\n' for number in range(40)]
    settings = ("task.name=data", f"data.train={problems}")
    problems.write_text("".join(rows))
    made = open_round(folder, *settings)
    opening.mark_launched(folder)
    shutil.rmtree(folder / "task")
    assert open_round(folder, *settings) == made, "the same problems, read again"
    problems.write_text("".join(rows[:-1]))
    shutil.rmtree(folder / "task")
    with pytest.raises(ConfigInvalid, match="differ from those of the round's start") as refused:
        open_round(folder, *settings)
    assert "round.directory" in refused.value.hint
    problems.write_text("".join(rows))
    shutil.rmtree(folder / "task")
    assert open_round(folder, *settings) == made
