"""The control socket: who may open it, what it answers, and what is left when its agent was killed."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from protocol import limits
from protocol.errors import DiskFull, SwarmError
from protocol.ids import LeaseId
from protocol.work.messages import Verdict
from swarm_node.allowance.governor import Governor, UploadCounter
from swarm_node.coordinator_api.join_string import JoinString, parse
from swarm_node.keys import identity
from swarm_node.machine import gpu
from swarm_node.owner import stopped
from swarm_node.owner.control_server import CONNECTIONS_MAX, listening
from swarm_node.owner.control_socket import FOLDER, LINE_MAX_BYTES, PORT, SOCKET, NoAgent, ask, knock
from swarm_node.owner.snapshot import judged_row
from swarm_node.work.verdicts import ANSWERS_MAX, JudgedRollout

pytestmark = pytest.mark.trio

DEADLINE_S = 30.0

STALE = """
import sys, trio
from pathlib import Path
from swarm_node.owner.control_socket import open_door

async def main():
    await open_door(Path(sys.argv[1]))
    print("open", flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


HOT = gpu.Card("nvidia", "RTX 4090", celsius=90.0, watts=300.0)


def governor(home: Path, cards: Sequence[int] = ()) -> Governor:
    home.mkdir(parents=True, exist_ok=True)
    return Governor(home, UploadCounter(home, lambda: datetime.now(UTC)), cards=cards, look_at_cards=gpu.GpuProbe)


async def test_what_the_engine_itself_computes_is_not_taken_for_somebody_at_the_machine(tmp_path: Path) -> None:
    asked: list[int] = []
    made = Governor(
        tmp_path,
        UploadCounter(tmp_path, lambda: datetime.now(UTC)),
        given={"idle_minutes": 5.0},
        threads=4,
        look_at_load=asked.append,
    )
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            while not asked:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert asked[0] == 4


@asynccontextmanager
async def agent(home: Path, cards: Sequence[int] = ()) -> AsyncIterator[Governor]:
    """The control side of an agent."""
    made = governor(home, cards)

    def status() -> dict[str, Any]:
        return {"resting": made.decision.reason_line}

    with trio.fail_after(DEADLINE_S):
        async with listening(home, made, status):
            yield made


def open_and_kill(home: Path) -> None:
    """An agent that could not clean up behind itself."""
    with subprocess.Popen([sys.executable, "-P", "-c", STALE, str(home)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        os.kill(process.pid, signal.SIGKILL)


def long_home(tmp_path: Path) -> Path:
    """One whose path is too long for a Unix socket."""
    return tmp_path / ("x" * 90) / "home"


async def test_orders_take_effect_before_they_are_answered(tmp_path: Path) -> None:
    async with agent(tmp_path) as made:
        assert await ask(tmp_path, "status") == {"resting": ""}
        assert "paused" in (await ask(tmp_path, "pause"))["resting"]
        assert made.decision.at_once
        assert await ask(tmp_path, "resume") == {"resting": ""}
        assert "finishing" in (await ask(tmp_path, "finish"))["resting"]
        assert made.finishing
        await ask(tmp_path, "leave")
        assert made.leaving.is_set()


async def test_one_card_is_paused_and_resumed_and_the_node_rests_when_all_are(tmp_path: Path) -> None:
    async with agent(tmp_path, cards=(0, 2)) as made:
        await ask(tmp_path, "pause", card=2)
        assert made.decision.may_work
        assert {number: card.may_work for number, card in made.card_decisions.items()} == {0: True, 2: False}
        said = (await ask(tmp_path, "pause", card=0, minutes=30))["resting"]
        assert "card 0: paused by you until " in said
        assert "card 2: paused by you; `swarm-node resume --card 2`" in said
        assert not made.decision.may_work
        assert (await ask(tmp_path, "resume", card=0))["resting"] == ""
        await ask(tmp_path, "resume")
        assert all(card.may_work for card in made.card_decisions.values()), "without a card, every card resumes"
        with pytest.raises(SwarmError, match="This node uses no card 1") as refused:
            await ask(tmp_path, "pause", card=1)
        assert "0, 2" in refused.value.hint


async def test_one_round_is_paused_finished_and_left_and_the_others_go_on(tmp_path: Path) -> None:
    async with agent(tmp_path, cards=(0,)) as made:
        one, other = (made.open_round(JoinString(f"http://{name}:8700", name * 32)) for name in ("aa", "bb"))
        assert await ask(tmp_path, "pause", round_name="aa:8700", minutes=30) == {"resting": ""}, "the node goes on"
        assert one.decision.at_once
        assert "round paused by you until " in one.decision.reason_line
        assert other.decision.may_work
        await ask(tmp_path, "finish", round_name=str(other.join))
        assert (other.finishing, one.finishing, made.finishing) == (True, False, False)
        assert not other.decision.at_once
        await ask(tmp_path, "resume", round_name="a" * 6)
        assert (one.decision.may_work, other.finishing) == (True, True)
        await ask(tmp_path, "pause", round_name="http://aa:8700/")
        await ask(tmp_path, "resume")
        assert (one.decision.may_work, other.decision.may_work, other.finishing) == (True, True, False)
        await ask(tmp_path, "leave", round_name="bb:8700")
        assert other.leaving.is_set()
        assert not made.leaving.is_set()
        made.close_round(other)
        for name in ("bb:8700", "aaaaa", "nowhere"):
            with pytest.raises(SwarmError, match=f"takes part in no round {name}") as refused:
                await ask(tmp_path, "pause", round_name=name)
            assert refused.value.hint == "Its rounds: aa:8700."
        with pytest.raises(SwarmError, match="takes part in no round"):
            await ask(tmp_path, "pause", round_name=f"http://aa:8700#{'b' * 64}")
        made.open_round(JoinString("http://cc:8700", "aa" * 31 + "cc"))
        with pytest.raises(SwarmError, match="aaaaaa names several rounds") as refused:
            await ask(tmp_path, "pause", round_name="aaaaaa")
        assert refused.value.hint == "Name one by its address: aa:8700, cc:8700."
        with pytest.raises(SwarmError, match="`--card` and a round cannot be combined"):
            await ask(tmp_path, "pause", round_name="aa:8700", card=0)


async def test_a_round_is_told_at_once_when_its_pause_begins_and_ends(tmp_path: Path) -> None:
    made = governor(tmp_path)
    one = made.open_round(JoinString("http://aa:8700", "aa" * 32))
    with trio.fail_after(DEADLINE_S):
        for order, wait in ((made.pause, one.closed), (made.resume, one.opened), (made.finish, one.finishes)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                order(round_name="aa:8700")


async def test_a_move_finishes_first_names_the_round_and_is_cancelled_by_resume(tmp_path: Path) -> None:
    other = f"https://other.example#{'a' * 64}"
    async with agent(tmp_path) as made:
        assert "finishing" in (await ask(tmp_path, "move", join_string=other))["resting"]
        assert (made.finishing, made.next_round) == (True, other)
        await ask(tmp_path, "finish")
        assert (made.finishing, made.next_round) == (True, ""), "the owner wants it to end"
        await ask(tmp_path, "move", join_string=other)
        await ask(tmp_path, "resume")
        assert (made.finishing, made.next_round) == (False, "")
        for wrong in (None, "", "other.example", "https://other.example#1"):
            with pytest.raises(SwarmError):
                await ask(tmp_path, "move", join_string=wrong)
        assert (made.finishing, made.next_round) == (False, "")


async def test_a_move_to_the_round_that_the_node_works_for_is_refused(tmp_path: Path) -> None:
    here = f"https://here.example#{'b' * 64}"
    async with agent(tmp_path) as made:
        made.open_round(parse(here))
        with pytest.raises(SwarmError, match=r"already takes part in the round at https://here\.example"):
            await ask(tmp_path, "move", join_string=here)
        assert (made.finishing, made.next_round) == (False, "")


async def test_an_order_that_is_refused_is_not_logged_as_one_that_was_carried_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with agent(tmp_path):
        with pytest.raises(SwarmError, match="takes part in no round"):
            await ask(tmp_path, "pause", round_name="127.0.0.1:8799")
        assert "asked to" not in caplog.text
        await ask(tmp_path, "pause")
        assert "asked to pause" in caplog.text


async def test_a_snooze_ends_by_itself(tmp_path: Path) -> None:
    async with agent(tmp_path) as made, trio.open_nursery() as nursery:
        assert "paused by you until" in (await ask(tmp_path, "pause", minutes=0.001))["resting"]
        nursery.start_soon(made.run)
        while not made.decision.may_work:
            await made.changes()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("do", "options"),
    [
        ("pause", {"card": "1"}),
        ("pause", {"card": True}),
        ("pause", {"minutes": 0}),
        ("pause", {"minutes": float("nan")}),
        ("pause", {"hours": 1}),
        ("resume", {"minutes": 5}),
        ("leave", {"card": 0}),
        ("finish", {"round_name": 7}),
        ("move", {"round_name": "here"}),
    ],
)
async def test_an_order_with_an_option_that_it_does_not_know_is_refused(
    tmp_path: Path, do: str, options: dict[str, Any]
) -> None:
    async with agent(tmp_path, cards=(0, 1)) as made:
        with pytest.raises(SwarmError, match="an option that it does not know"):
            await ask(tmp_path, do, **options)
        assert made.decision.may_work
        assert not made.leaving.is_set()


async def test_readings_decide_each_card_and_a_reading_that_is_lost_forbids_nothing(tmp_path: Path) -> None:
    readings = deque([gpu.GpuProbe((HOT, HOT._replace(celsius=50.0, number=1))), gpu.GpuProbe(trouble="it hangs")])
    uploads = UploadCounter(tmp_path, lambda: datetime.now(UTC))
    made = Governor(tmp_path, uploads, given={"celsius": 80.0}, cards=(0, 1), look_at_cards=readings.popleft)
    for may_work in ([False, True], [True, True]):
        await made._measure(watch_cards=False)
        made._decide()
        assert [card.may_work for card in made.card_decisions.values()] == may_work


async def test_the_socket_is_its_owners_alone_and_gone_with_the_agent(tmp_path: Path) -> None:
    async with agent(tmp_path):
        for path, mode in ((tmp_path / FOLDER, 0o700), (tmp_path / FOLDER / SOCKET, 0o600)):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list((tmp_path / FOLDER).iterdir()) == []
    with pytest.raises(NoAgent, match="No agent is running"):
        await ask(tmp_path, "status")


async def test_an_agent_that_starts_or_ends_is_told_from_none(tmp_path: Path) -> None:
    """An engine takes seconds to end, and until then no record says why the agent ended."""
    identity.load_or_create(tmp_path / identity.FILE)
    with identity.only_agent(tmp_path), pytest.raises(NoAgent, match="is starting or stopping"):
        await ask(tmp_path, "status")
    with pytest.raises(NoAgent, match="No agent is running"):
        await ask(tmp_path, "status")


async def test_a_home_whose_lock_cannot_be_checked_has_no_agent_that_starts(tmp_path: Path) -> None:
    """Another user's home would be said for ever to start in a few seconds."""
    identity.load_or_create(tmp_path / identity.FILE)
    (tmp_path / "agent.lock").mkdir()
    with pytest.raises(NoAgent, match="No agent is running"):
        await ask(tmp_path, "status")


async def test_where_no_socket_fits_a_port_asks_for_a_token(tmp_path: Path) -> None:
    home = long_home(tmp_path)
    async with agent(home):
        file = home / FOLDER / PORT
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert await ask(home, "status") == {"resting": ""}
        said = json.loads(file.read_bytes())
        file.write_text(json.dumps(said | {"token": "0" * 64}))
        with pytest.raises(SwarmError, match="token is wrong"):
            await ask(home, "pause")
        async with await trio.open_tcp_stream("127.0.0.1", said["port"]) as stream:
            await stream.send_all(b'{"do": "leave"}\n')
            assert json.loads(await stream.receive_some())["code"] == "not_authorised"
    assert list((home / FOLDER).iterdir()) == []


@pytest.mark.parametrize("place", ["short", "long"])
async def test_what_a_killed_agent_left_is_no_agent_and_hinders_no_other(tmp_path: Path, place: str) -> None:
    home = tmp_path if place == "short" else long_home(tmp_path)
    home.mkdir(parents=True, exist_ok=True)
    open_and_kill(home)
    assert list((home / FOLDER).iterdir())
    with pytest.raises(NoAgent):
        await ask(home, "status")
    async with agent(home):
        assert await ask(home, "status") == {"resting": ""}


@pytest.mark.parametrize("junk", [b"\n", b"[]\n", b"{}\n", b'{"do": "explode"}\n', b'{"do": ["status"]}\n', b"\xff\n"])
async def test_junk_is_answered_by_name_and_the_agent_goes_on(tmp_path: Path, junk: bytes) -> None:
    async with agent(tmp_path) as made:
        stream, _ = await knock(tmp_path)
        async with stream:
            await stream.send_all(junk)
            answer = json.loads(await stream.receive_some())
        assert (answer["ok"], answer["code"]) == (False, "malformed_message")
        assert await ask(tmp_path, "status") == {"resting": ""}
        assert not made.leaving.is_set()


@pytest.mark.parametrize("junk", [b"[" * 60_000, b'{"do": "leave", "token": "\\ud800"}'], ids=["deep", "half a pair"])
async def test_a_stranger_at_the_port_does_not_end_the_agent(tmp_path: Path, junk: bytes) -> None:
    home = long_home(tmp_path)
    async with agent(home) as made:
        said = json.loads((home / FOLDER / PORT).read_bytes())
        async with await trio.open_tcp_stream("127.0.0.1", said["port"]) as stream:
            await stream.send_all(junk + b"\n")
            assert json.loads(await stream.receive_some())["ok"] is False
        assert await ask(home, "status") == {"resting": ""}
        assert not made.leaving.is_set()


async def test_who_sends_without_end_or_leaves_half_way_costs_nothing(tmp_path: Path) -> None:
    async with agent(tmp_path):
        stream, _ = await knock(tmp_path)
        async with stream:
            try:
                await stream.send_all(b"x" * (2 * LINE_MAX_BYTES))
                assert json.loads(await stream.receive_some())["ok"] is False
            except trio.BrokenResourceError:
                pass  # it was cut off before it had sent everything
        stream, _ = await knock(tmp_path)
        await stream.send_all(b'{"do": "sta')
        await stream.aclose()
        assert await ask(tmp_path, "status") == {"resting": ""}


async def test_a_coordinator_with_long_words_does_not_make_the_status_too_long(tmp_path: Path) -> None:
    words = "\u202e" * limits.STRING_MAX_BYTES
    verdict = Verdict(lease_id="a" * 32, outcome="rejected", code=words, message=words)
    rows = [judged_row(JudgedRollout(0, LeaseId("a" * 32), "", verdict)) for _ in range(ANSWERS_MAX)]
    assert len(json.dumps(rows)) < 0.6 * LINE_MAX_BYTES


async def test_connections_that_say_nothing_hold_up_nobody_for_long(tmp_path: Path) -> None:
    async with agent(tmp_path):
        silent = [(await knock(tmp_path))[0] for _ in range(CONNECTIONS_MAX)]
        assert await ask(tmp_path, "status") == {"resting": ""}
        for stream in silent:
            await stream.aclose()


async def test_why_the_last_agent_ended_is_remembered(tmp_path: Path) -> None:
    assert stopped.last(tmp_path) is None
    stopped.record_end(tmp_path, DiskFull("No room.", hint="Make some."))
    told = stopped.last(tmp_path)
    assert told is not None
    assert (told["code"], told["message"], told["hint"]) == ("disk_full", "No room.", "Make some.")
    stopped.forget(tmp_path)
    assert stopped.last(tmp_path) is None
    (tmp_path / stopped.FILE).write_text("{")
    assert stopped.last(tmp_path) is None
