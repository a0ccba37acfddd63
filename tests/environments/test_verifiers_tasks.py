"""Environments of verifiers: our taskset `vault`, installed as any other, with its tool, its user and its rewards."""

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import load
from coordinator.environments import verifiers_tasks
from coordinator.environments.host import TurnQuestion
from coordinator.tasks.kinds import process_spec
from coordinator.tasks.task_pool import TaskPool
from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward
from tests.environments.playing import Played, call, play, problems

VAULT: dict[str, Any] = {"id": "vault", "args": {"task": {"tool": False}}}
TOOL: dict[str, Any] = {"id": "vault"}
TALK: dict[str, Any] = VAULT | {"args": {"prompted": False, "task": {"tool": False}}, "config": {"asks": 2}}

installed = importlib.util.find_spec("vault") is not None
needs_library = [
    pytest.mark.skipif(not installed, reason="verifiers is not installed here; make test-environments has it"),
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),  # verifiers' own use of tenacity
]


def code(problem: Problem) -> str:
    """Return the code of a safe."""
    return str(100 + 7 * int(problem.columns["task"]))


@pytest.mark.skipif(installed, reason="verifiers is installed here")
def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(ConfigInvalid, match="not installed") as caught:
        problems(verifiers_tasks, **VAULT)
    assert caught.value.hint == "pip install 'echo-swarm[verifiers]'"


class TestVault:
    """Episodes of one turn, with a tool, and with a user."""

    pytestmark = needs_library

    def test_tasks_of_one_turn_are_judged_by_their_rewards(self) -> None:
        first, second, _ = problems(verifiers_tasks, **VAULT)
        assert first.prompt == (("system", "You open safes."), ("user", f"Open safe {first.columns['task']}."))
        assert first.columns["tools"] == []

        right = play(verifiers_tasks, first, [f"It is {code(first)}, please."], **VAULT)
        assert right.read == [None]
        assert right.earned == Reward(1.5, "ok", {"opened": 1.0, "polite": 0.5, "tries": 0.0})
        assert play(verifiers_tasks, second, ["It is locked."], **VAULT).score == 0.0

    def test_a_tool_is_called_until_a_turn_calls_none(self) -> None:
        first, *_ = problems(verifiers_tasks, **TOOL)
        (tool,) = first.columns["tools"]
        assert tool["function"]["name"] == "safe_turn"
        assert tool["function"]["parameters"]["required"] == ["wheel", "digit"]

        digit = int(code(first)[0])
        both = call("safe_turn", wheel=0, digit=digit) + call("safe_turn", wheel=0, digit=9)
        bad = [call("dynamite"), "<tool_call>{", call("safe_turn", wheel="left", digit=1)]
        played = play(verifiers_tasks, first, [both, *bad, code(first)], **TOOL)
        said = [[each["content"] for each in read] for read in played.read[:-1]]
        assert said[0] == ["click", "nothing (2)"]
        assert "There is no tool 'dynamite'. There are: safe_turn." in said[1][0]
        assert said[2][0].startswith("error: ")
        assert "valid integer" in said[3][0]
        assert played.read[-1] is None
        assert played.score == 1.0
        assert played.earned.components["tries"] == 2.0

    @pytest.mark.asyncio
    async def test_the_server_of_a_tool_runs_in_the_sandbox_of_a_task_process(self, tmp_path: Path) -> None:
        first, *_ = problems(verifiers_tasks, **TOOL)
        settings = [
            "task.name=verifiers",
            'task.parameters={id="vault"}',
            "reward.network=true",
            "reward.timeout_s=120",
        ]
        pool = TaskPool(process_spec(load(None, [*settings, f"round.directory={tmp_path}"])))
        try:
            turns = [call("safe_turn", wheel=0, digit=int(code(first)[0]))]
            (read,) = await pool.play(TurnQuestion("0", first, [turns], [False]))
            (last,) = await pool.play(TurnQuestion("0", first, [[*turns, code(first)]], [False]))
        finally:
            await pool.close()
        assert read is not None
        assert read.read == ([{"role": "tool", "content": "click", "name": "safe_turn"}],)
        assert last is not None
        assert last.reward == Reward(1.0, "ok", {"opened": 1.0, "polite": 0.0, "tries": 1.0})

    def test_an_environment_can_open_and_continue_the_conversation(self) -> None:
        first, *_ = problems(verifiers_tasks, **TALK)
        assert first.prompt == (("system", "You open safes."), ("user", "Hello. Open my safe."))

        played = play(verifiers_tasks, first, ["000", "Hm.", f"{code(first)}, please"], **TALK)
        asked = [[{"role": "user", "content": f"Are you sure ({number})?"}] for number in range(2)]
        assert played.read == [*asked, None]
        assert played.score == 1.5

    def test_an_episode_that_is_cut_off_is_scored_as_it_stands(self) -> None:
        first, *_ = problems(verifiers_tasks, **TALK)
        assert play(verifiers_tasks, first, [code(first)], **TALK).score == 1.0
        assert play(verifiers_tasks, first, ["no", "no"], **TALK).score == 0.0

    def test_the_same_turns_are_answered_the_same_and_episodes_do_not_mix(self) -> None:
        rows = problems(verifiers_tasks, size=6, **TALK)
        assert rows == problems(verifiers_tasks, size=6, **TALK)
        turns = [[f"first {code(row)}", "second", f"{code(row)} please"] for row in rows]
        alone = [play(verifiers_tasks, row, said, **TALK) for row, said in zip(rows, turns, strict=True)]

        async def one(row: Problem, said: list[str]) -> Played:
            episode = verifiers_tasks.Environment(row, **TALK)
            return Played([await episode.step(turn) for turn in said], await episode.reward())

        async def together() -> list[Played]:
            return await asyncio.gather(*map(one, rows, turns))

        assert asyncio.run(together()) == alone

    def test_a_reward_that_fails_is_no_reward_of_zero(self) -> None:
        first, *_ = problems(verifiers_tasks, **VAULT)
        earned = play(verifiers_tasks, first, ["a fault"], **VAULT).earned
        assert earned.status == "verifier_error"
        assert "the scales are broken" in earned.reason

    def test_every_task_is_in_one_split(self) -> None:
        parts = [
            {row.columns["task"] for row in problems(verifiers_tasks, split, size=99, **VAULT)}
            for split in ("train", "validation", "held_out")
        ]
        assert sum(map(len, parts)) == len(set().union(*parts)) == 40
        assert all(parts)

    def test_a_wrong_setting_is_named(self) -> None:
        with pytest.raises(ConfigInvalid, match="cannot load 'no-such-safe'") as caught:
            problems(verifiers_tasks, id="no-such-safe")
        assert "Install the package" in str(caught.value.hint)
        with pytest.raises(ConfigInvalid, match="colour"):
            problems(verifiers_tasks, id="vault", args={"colour": "red"})
        first, *_ = problems(verifiers_tasks, **VAULT)
        changed = replace(first, columns={**first.columns, "key": "another"})
        with pytest.raises(ConfigInvalid, match="has changed since the round began"):
            play(verifiers_tasks, changed, ["123"], **VAULT)
