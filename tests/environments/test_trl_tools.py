"""Classes and functions in TRL's convention, by file and name."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.environments import trl_tools
from protocol.errors import ConfigInvalid
from tests.environments.playing import call, play, problems

TASK = str(Path(__file__).with_name("trl_task.py"))
SHOP: dict[str, Any] = {"factory": f"{TASK}:Shop", "data": f"{TASK}:problems"}
PRODUCT: dict[str, Any] = {
    "tools": [f"{TASK}:multiply"],
    "data": f"{TASK}:products",
    "reward": [f"{TASK}:has_answer", f"{TASK}:is_short"],
}


def test_reset_extends_the_prompt_and_methods_are_tools() -> None:
    first, second, _ = problems(trl_tools, **SHOP)

    assert first.prompt[0] == ("user", "Buy something. You have 10 coins.")
    assert second.prompt[0] == ("user", "Buy something. You have 11 coins.")
    (tool,) = first.columns["tools"]
    assert tool["function"]["name"] == "buy"
    assert tool["function"]["parameters"]["properties"]["price"]["type"] == "integer"
    assert "count" not in tool["function"]["parameters"]["required"]


def test_calls_are_answered_until_a_turn_has_none() -> None:
    first, second, _ = problems(trl_tools, **SHOP)

    played = play(
        trl_tools, first, [call("buy", item="tea", price=4), call("buy", item="cup", price=3, count=2), "Done."], **SHOP
    )
    assert played.read == [
        [{"role": "tool", "name": "buy", "content": "tea bought, 6 coins left."}],
        [{"role": "tool", "name": "buy", "content": "cup bought, 0 coins left."}],
        None,
    ]
    assert played.score == 1.0
    assert play(trl_tools, second, [call("buy", item="tea", price=4), "Done."], **SHOP).score == 0.0
    assert play(trl_tools, second, [call("buy", item="tea", price=11)], **SHOP).score == 1.0  # cut off


def test_what_a_tool_raises_is_read_by_the_policy() -> None:
    first, _, _ = problems(trl_tools, **SHOP)

    turns = [call("buy", item="car", price=900), call("steal"), call("buy", colour="red"), "<tool_call>{", "No."]
    played = play(trl_tools, first, turns, **SHOP)
    said = [read[0]["content"] for read in played.read[:-1]]
    assert said[0] == "{'error': 'Too dear.'}"
    assert "There is no tool 'steal'. There are: buy." in said[1]
    assert "unexpected keyword argument" in said[2]
    assert said[3]
    assert played.read[-1] is None
    assert played.earned == {"score": 0.0, "tool_calls": 2.0, "tool_errors": 4.0}


def test_functions_without_state_are_judged_by_reward_functions() -> None:
    (product,) = problems(trl_tools, **PRODUCT)

    assert product.answer == "144"
    played = play(trl_tools, product, [call("multiply", a=12, b=12), "It is 144."], **PRODUCT)
    assert played.read == [[{"role": "tool", "name": "multiply", "content": "144"}], None]
    assert played.earned == {
        "score": 1.5,
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "has_answer": 1.0,
        "is_short": 0.5,
    }
    assert play(trl_tools, product, ["It is 150."], **PRODUCT).score == 0.5


def test_a_reward_function_reads_the_instance() -> None:
    first, *_ = problems(trl_tools, **SHOP)
    judged = SHOP | {"reward": f"{TASK}:spent"}
    assert play(trl_tools, first, [call("buy", item="all", price=10), "Done."], **judged).score == 0.5


def test_the_same_turns_are_answered_the_same() -> None:
    first, *_ = problems(trl_tools, **SHOP)
    turns = [call("buy", item="tea", price=4), call("buy", item="cup", price=40), "Done."]
    assert play(trl_tools, first, turns, **SHOP) == play(trl_tools, first, turns, **SHOP)


def test_a_reset_with_another_text_each_time_is_refused() -> None:
    moody = SHOP | {"factory": f"{TASK}:Moody"}
    first, *_ = problems(trl_tools, **moody)
    with pytest.raises(RuntimeError, match="reset must return the same text"):
        play(trl_tools, first, ["Hello."], **moody)


def test_rows_of_a_file_are_split_by_their_digest(tmp_path: Path) -> None:
    rows = [{"prompt": f"Buy {number}.", "budget": number} for number in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = SHOP | {"data": str(tmp_path / "rows.jsonl")}
    splits = {split: problems(trl_tools, split, size=99, **read) for split in ("train", "validation", "held_out")}

    assert sum(map(len, splits.values())) == 50
    assert all(splits.values())
    named = SHOP | {"data": {"train": str(tmp_path / "rows.jsonl")}}
    assert len(problems(trl_tools, size=99, **named)) == 50
    assert not problems(trl_tools, "held_out", **named)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"factory": "no_such.py:Shop"}, "no_such.py cannot be loaded"),
        ({"factory": f"{TASK}:Nothing"}, "has no Nothing"),
        ({"factory": "Shop"}, "names no object"),
        ({"factory": ""}, "need `factory` or `tools`"),
        ({"factory": "", "tools": [f"{TASK}:multiply"]}, "no state to read a reward from"),
        ({"data": "missing.jsonl"}, "Cannot read missing.jsonl"),
    ],
)
def test_a_wrong_setting_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        problems(trl_tools, **SHOP | changed)
