"""Sampled rollouts as people read them: which, in what order, and that nothing is changed or obeyed."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.commands import samples
from coordinator.commands.sample_records import SampleFilter, Shown, find
from protocol.errors import ConfigInvalid, NotFound
from protocol.wire.signing import NodeKey
from protocol.work.learning import TrainingGroup
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens
from tests.coordinator.served import Served, serve
from tests.coordinator.world import END, World, answer, clear, honest_sample

WRONG = Sample(tokens=pack_tokens([7, END]), logprobs=pack_logprobs([-0.5, -0.1]), finish="stop")


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def worth(group: TrainingGroup) -> list[float]:
    return [sample.reward - 0.5 for sample in group.samples]


def found(world: World, limit: int = 100, **wanted: Any) -> list[Shown]:
    samples: list[Shown] = world.run(find, SampleFilter(**wanted), limit, decode, worth)
    return samples


def half_right(world: World, key: NodeKey, version: int = 1) -> None:
    """A group of a right and a wrong sample, a second after the last."""
    world.now_ms += 1000
    lease = world.lease(key, version=version)
    assert world.submit(key, answer(key, lease, samples=(honest_sample(lease), WRONG))).outcome == "accepted"


def test_samples_come_newest_group_first_with_all_that_is_known(world: World) -> None:
    key, other = world.join(1), world.join(2)
    half_right(world, key)
    half_right(world, other)
    before = world.dump()
    shown = found(world)
    assert [(one.prompt, one.completion, one.reward, one.name) for one in shown] == [
        ("11", "11 1", 1.0, "node 2"),
        ("11", "7 1", 0.0, "node 2"),
        ("10", "10 1", 1.0, "node 1"),
        ("10", "7 1", 0.0, "node 1"),
    ]
    assert {(one.version, one.update, one.state, one.trained_in, one.advantage) for one in shown} == {
        (1, 0, "buffered", None, None)
    }
    assert found(world, limit=3) == shown[:3]
    assert world.dump() == before


def test_a_trained_group_has_its_update_and_advantages(world: World) -> None:
    key = world.join(1)
    for _ in range(2):
        half_right(world, key)
    world.train(1)
    assert [(one.state, one.trained_in, one.advantage) for one in found(world, limit=2)] == [
        ("batched", 1, 0.5),
        ("batched", 1, -0.5),
    ]


def test_filters_narrow_down_together(world: World) -> None:
    key, other = world.join(1), world.join(2)
    half_right(world, key)
    world.publish(2, 1)
    half_right(world, other, version=2)
    assert [one.reward for one in found(world, lowest=0.5)] == [1.0, 1.0]
    assert [one.reward for one in found(world, highest=0.0)] == [0.0, 0.0]
    assert {one.version for one in found(world, version=2)} == {2}
    assert {one.node_id for one in found(world, node="node 1")} == {key.node_id}
    assert [one.completion for one in found(world, text=re.compile(r"^7\b"), node="node 2")] == ["7 1"]
    assert [one.completion for one in found(world, text=re.compile("^11$"))] == ["11 1", "7 1"], "by its prompt"
    assert found(world, version=2, node="node 1") == []
    with pytest.raises(NotFound, match="No node is called"):
        found(world, node="nobody")


def test_what_is_not_judged_yet_is_shown_but_in_no_range_of_rewards(world: World) -> None:
    world.judge = replace(world.judge, reward=None)
    half_right(world, world.join(1))
    assert [(one.reward, one.status, one.completion) for one in found(world)] == [
        (None, "unscored", "10 1"),
        (None, "unscored", "7 1"),
    ]
    assert found(world, highest=100.0) == []


def test_what_another_node_had_begun_is_part_of_the_completion(world: World) -> None:
    lease = world.leave(world.join(1), {0: [10], 1: [10]}, heir=(heir := world.join(2)))
    assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
    assert [one.completion for one in found(world)] == ["10 1", "10 1"]


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_that_a_stranger_wrote_reaches_the_terminal_as_it_is(
    as_json: bool, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    half_right(world, world.join(1))
    (one,) = found(world, limit=1)
    evil = "\x1b[2J\x9b\r\x7f\u202e\nreward 1, advantage +9"
    components = {evil: 1.0, "form": None}
    samples.print_samples([replace(one, prompt=evil, completion=evil, name=evil, components=components)], as_json)
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x9b\r\x7f\u202e")
    assert sum(text.startswith("reward") for text in said.split("\n")) == (0 if as_json else 1)
    if as_json:
        assert json.loads(said)[0]["completion"] == evil
    else:
        assert said.count(r"  | \x1b[2J\x9b\x0d\x7f\u202e") == 2


async def trained(served: Served) -> None:
    """A round in which a batch was formed."""
    await served.publish()
    node = await served.join()
    for lease in await served.lease(node, groups=2):
        (verdict,) = await served.submit(node, served.answer(node, lease))
        assert verdict.outcome == "accepted"
    response = await served.client.get("/v1/learner/batches/1", headers=served.operator)
    assert response.status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_round_is_read_while_it_runs_and_after(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file, url = tmp_path / "round.toml", ""
    file.write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\n')
    if kind == "postgresql":
        clear(url := request.getfixturevalue("postgres_url"))
    place = [f"store.url={url}"] if url else []
    words = ["--set", *place] if place else []

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, ["samples", *arguments, *words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.output) if "--json" in arguments else result.output

    async with serve(tmp_path, *place) as served:
        await trained(served)
        shown = run("show", str(file), "--json")
    assert len(shown) == 4
    assert {(one["completion"], one["trained_in"], one["state"]) for one in shown} == {("85<|im_end|>", 1, "batched")}
    assert all(one["prompt"].endswith("=") and one["advantage"] == 0.0 for one in shown)
    assert run("show", str(file), "--json") == shown, "the same of a stopped round"
    assert run("grep", str(file), r"85<\|IM", "-i", "--json", "--limit", "1") == shown[:1]
    assert run("grep", str(file), "86") == "No samples match.\n"
    assert run("show", str(file), "--reward-min", "2") == "No samples match.\n"
    assert f"  | {shown[0]['prompt']}\n  answered\n  | 85<|im_end|>\n" in run("show", str(file))


def test_a_wrong_pattern_and_a_folder_without_a_round_are_told(tmp_path: Path) -> None:
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\n')
    with pytest.raises(ConfigInvalid, match="Invalid regular expression"):
        CliRunner().invoke(app, ["samples", "grep", str(file), "("], catch_exceptions=False)
    with pytest.raises(ConfigInvalid, match="There is no round"):
        CliRunner().invoke(app, ["samples", "show", str(file)], catch_exceptions=False)
    assert not (tmp_path / "round").exists()
