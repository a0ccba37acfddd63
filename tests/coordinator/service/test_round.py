"""Opening a round: a new folder is furnished once, an old one continues with the settings it was counted with."""

import json
import shutil
from pathlib import Path

import pytest

from coordinator.app import run
from coordinator.config import load
from coordinator.service.round import Round
from protocol.errors import ConfigInvalid, UntrustedRoot
from protocol.policy import trust
from protocol.text.money import Unit
from tests.coordinator.policy_files import write_policy


def open_round(folder: Path, *settings: str) -> str:
    round_ = Round(load(None, [f"round.directory={folder}", *settings]))
    round_.close()
    return round_.round_id


def test_opening_again_continues_the_same_round(tmp_path: Path) -> None:
    assert open_round(tmp_path) == open_round(tmp_path, "leases.timeout_s=5", "round.max_updates=7")


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
    with pytest.raises(ConfigInvalid, match=name):
        open_round(tmp_path, setting)
    open_round(tmp_path)


def test_the_round_id_pins_the_unit(tmp_path: Path) -> None:
    round_id = open_round(tmp_path, "round.unit=EUR", "round.unit_decimals=2")
    root = (tmp_path / "metadata" / "1.root.json").read_bytes()
    assert trust.unit_of(trust.pin(root, round_id).root) == Unit("EUR", 2)
    with pytest.raises(UntrustedRoot):
        trust.pin(root.replace(b"EUR", b"USD"), round_id)


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
    (tmp_path / "learner").mkdir(mode=0o755)
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
