"""Messages to the owner: a real command gets each once, also over restarts and failures."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from protocol.errors import ConfigInvalid
from swarm_node.commands.options import words_of
from swarm_node.owner.notify import HOLD_MS, PAUSE_MS, WAITING_MAX, OwnerNotifier, ToldOwner, observe
from swarm_node.owner.snapshot import AgentSnapshot

pytestmark = pytest.mark.trio

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


@dataclass
class Seen:
    """The parts of a snapshot that messages depend on."""

    trouble: str = ""
    distrust: str = ""
    rates: dict[str, Any] | None = None
    unit: dict[str, Any] | None = None
    node_id: str = "12D3KooWexample"
    name: str = "rig1"
    coordinator: str = "https://swarm.example.org"

    def now(self) -> AgentSnapshot:
        return cast(AgentSnapshot, self)


class Desk:
    """An agent's folder and the owner's command, which appends messages to a file."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.seen, self.file, self._folder = Seen(unit={"name": "EUR", "decimals": 2}), folder / "messages", folder
        self._command = command or (sys.executable, "-c", APPEND, str(self.file))
        self.start()

    def start(self) -> None:
        """Begin anew, as after a restart of the agent."""
        self.notifier = OwnerNotifier(self._command, self._folder, self.seen.now)

    def said(self) -> list[tuple[str, str]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [(each["kind"], each["text"]) for each in map(json.loads, lines)]


async def test_trouble_is_one_message_and_its_end_another_over_restarts(tmp_path: Path) -> None:
    desk, now = Desk(tmp_path), 1_000_000
    desk.seen.trouble = "The coordinator does not answer."
    for _ in range(4):
        await desk.notifier.check(now)
        desk.start()
        now += HOLD_MS // 2
    assert desk.said() == [("trouble", "The coordinator does not answer.")]
    desk.seen.trouble = ""
    for _ in range(4):
        await desk.notifier.check(now)
        desk.start()
        now += HOLD_MS // 2
    assert [kind for kind, _ in desk.said()] == ["trouble", "over"]


async def test_messages_of_two_rounds_have_different_ids(tmp_path: Path) -> None:
    ids = []
    for name in ("a1b2c3d4e5f60718", "0918273645546372"):
        (tmp_path / name).mkdir()
        desk = Desk(tmp_path / name)
        desk.seen.trouble = "The coordinator does not answer."
        await desk.notifier.check(0)
        await desk.notifier.check(HOLD_MS)
        ids.append(json.loads(desk.file.read_text())["id"])
    assert ids == ["Wexample-a1b2c3d4-1", "Wexample-09182736-1"]


async def test_a_full_disk_does_not_end_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)
    (tmp_path / "told.json").mkdir()  # nothing can replace a folder
    desk.seen.trouble = "The coordinator does not answer."
    with trio.move_on_after(0.2):
        await desk.notifier.run()
    assert "cannot save which messages were sent" in caplog.text


async def test_trouble_that_passes_is_no_message(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(20):
        desk.seen.trouble = "It hangs." if number % 2 else ""
        await desk.notifier.check(number * (HOLD_MS - 1))
    assert desk.said() == []


async def test_a_payout_is_told_and_those_before_the_first_look_are_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for count, paid_micros in (
        (None, 0),
        (2, 5_000_000),
        (2, 5_000_000),
        (3, 1_234_567_890_000),
        (3, 1_234_567_890_000),
    ):
        desk.seen.rates = None if count is None else {"payouts": count, "paid_micros": paid_micros}
        await desk.notifier.check(1)
        desk.start()
    assert desk.said() == [("payout", "Paid: 1,234,562.89 EUR. `swarm-node ledger payouts` fetches the proof.")]


@pytest.mark.parametrize("command", [(), (sys.executable, "-c", "")])
async def test_a_payout_is_logged_once_also_without_a_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: tuple[str, ...]
) -> None:
    caplog.set_level("INFO")
    seen = Seen(unit={"name": "EUR", "decimals": 2}, trouble="It hangs.")
    notifier = OwnerNotifier(command, tmp_path, seen.now)
    for count, paid_micros in ((2, 5_000_000), (3, 7_500_000), (3, 7_500_000)):
        seen.rates = {"payouts": count, "paid_micros": paid_micros}
        notifier = OwnerNotifier(command, tmp_path, seen.now)  # anew, as after a restart
        await notifier.check(1)
        await notifier.check(2)
    assert caplog.messages == ["Paid: 2.50 EUR. `swarm-node ledger payouts` fetches the proof."]
    assert not notifier.told.waiting
    assert bool(notifier.told.trouble) == bool(command), "without a command, trouble is not counted as told"


async def test_what_an_owner_was_paid_before_the_node_became_theirs_is_no_payout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that is delegated to a key with other nodes sees all payouts of that key."""
    caplog.set_level("INFO")
    seen = Seen(unit={"name": "EUR", "decimals": 2})
    notifier = OwnerNotifier((), tmp_path, seen.now)
    for owner, count, paid_micros in (("me", 0, 0), ("farm", 3, 9_000_000), ("farm", 4, 11_000_000)):
        seen.rates = {"owner": owner, "payouts": count, "paid_micros": paid_micros}
        await notifier.check(1)
    assert caplog.messages == ["Paid: 2.00 EUR. `swarm-node ledger payouts` fetches the proof."]


@pytest.mark.parametrize("command", [("false",), ("/nothing/here",)])
async def test_a_command_that_fails_is_run_again_later_and_the_message_stays(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    desk = Desk(tmp_path, *command)
    desk.seen.distrust = "The root key differs."
    await desk.notifier.check(0)
    await desk.notifier.check(HOLD_MS)
    (waiting,) = desk.notifier.told.waiting
    desk = Desk(tmp_path)
    desk.seen.distrust = "The root key differs."
    await desk.notifier.check(HOLD_MS + PAUSE_MS)
    assert desk.said() == [("trouble", "The root key differs.")]
    assert json.loads(desk.file.read_text())["id"] == waiting.id


async def test_pauses_grow_while_a_command_fails(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    desk = Desk(tmp_path, "sh", "-c", f"echo >> {ran}; exit 1")
    desk.seen.trouble = "It hangs."
    await desk.notifier.check(0)
    for minute in range(60):
        await desk.notifier.check(HOLD_MS + minute * 60_000)
    assert len(ran.read_text().splitlines()) == 6  # at minute 0, 1, 3, 7, 15, 31


async def test_messages_that_nobody_takes_are_bounded() -> None:
    told, seen = ToldOwner(payouts=0), Seen(unit={"name": "EUR", "decimals": 2})
    for number in range(1, 100):
        seen.rates = {"payouts": number, "paid_micros": number}
        told = observe(told, seen.now(), 0)
    assert len(told.waiting) == WAITING_MAX
    assert told.waiting[-1].id.endswith("-99")


async def test_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "told.json").write_text("{")
    assert Desk(tmp_path).notifier.told == ToldOwner(round=tmp_path.name[:8])


async def test_a_command_that_cannot_run_is_refused_at_the_start() -> None:
    assert words_of("sh -c 'cat > x'") == ("sh", "-c", "cat > x")
    assert words_of("") == ()
    with pytest.raises(ConfigInvalid, match="no program"):
        words_of("no-such-program --now")
    with pytest.raises(ConfigInvalid, match="quotation"):
        words_of("sh -c 'x")
