"""Engines play whole episodes: what they draw is what a forward pass dictates, what they insert is the game's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import EngineFailed, EnvironmentFailed
from protocol.policy.codec import PolicyCodec
from coordinator.environments.games import environments
from protocol.work.episode import Episode
from protocol.work.lease import Prefix
from protocol.work.rollout import Sample, unpack_tokens
from protocol.work.sampling import pick, uniforms
from protocol.work.transcript import Player, Transcript, prompt, replay
from swarm_node.engine.messages import GroupDone, GroupFailed, SampleRequest
from tests.swarm_node.engine.asking import END, PROMPTS, asked, sample
from tests.swarm_node.engine.conftest import Make
from tests.swarm_node.engine.test_engines import reference

TOKENS_MAX = 330
SOKOBAN = Episode(environment="sokoban", parameters={"turns": 4}, seed=11, turn_tokens_max=5)
LEDUC = Episode(environment="leduc", parameters={"opponent": "cfr"}, seed=3, turn_tokens_max=6)


def codec(policy: Path) -> PolicyCodec:
    return PolicyCodec((policy / "tokenizer.json").read_text())


def game(policy: Path, episode: Episode, seed: int = 7, **changes: Any) -> SampleRequest:
    return asked(prompt(episode, codec(policy)), seed, **({"episode": episode, "max_new_tokens": TOKENS_MAX} | changes))


def checked(policy: Path, episode: Episode, one: Sample, tokens_max: int = TOKENS_MAX) -> Transcript:
    player = Player(episode, codec(policy), end_tokens=frozenset({END}), tokens_max=tokens_max)
    found = replay(player, unpack_tokens(one.tokens).tolist())
    assert found.finish == one.finish
    assert not np.frombuffer(one.logprobs, "<f4")[~found.sampled].any()
    return found


def test_an_episode_is_what_the_policy_and_the_environment_dictate(pair: tuple[Make, Path]) -> None:
    """Beside a group without one, in fewer slots than samples, and another game in the same batch."""
    make, folder = pair
    engine = make(slots=4)
    engine.load(folder, 1)
    games = [game(folder, SOKOBAN, 1, samples=3), game(folder, LEDUC, 2, samples=3)]
    groups = sample(engine, games[0], asked(PROMPTS[1], 9), games[1])
    for request in games:
        assert request.episode is not None
        asks = unpack_tokens(request.prompt).tolist()
        for number, one in enumerate(groups[request.request_id]):
            tokens, drawn = unpack_tokens(one.tokens).tolist(), checked(folder, request.episode, one).sampled
            scores = reference(folder, asks, tokens, 1.0)
            expected = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
            assert np.abs(np.frombuffer(one.logprobs, "<f4") - expected)[drawn].max() < 1e-5
            chances = uniforms(request.seed, number, len(tokens))
            dictated = [pick(row.exp().numpy(), u) for row, u in zip(scores, chances, strict=True)]
            assert np.array_equal(np.array(tokens)[drawn], np.array(dictated)[drawn])
    assert any(not checked(folder, SOKOBAN, one).sampled.all() for one in groups["seed 1"])


def test_only_what_was_drawn_counts_as_sampled(make: Make, policy: Path) -> None:
    engine = make()
    engine.load(policy, 1)
    (group,) = sample(engine, game(policy, SOKOBAN)).values()
    drawn = sum(int(checked(policy, SOKOBAN, one).sampled.sum()) for one in group)
    measured = engine.measured()
    assert measured.first_tokens + measured.later_tokens == drawn < sum(len(one.tokens) // 4 for one in group)


@pytest.mark.parametrize("tokens_max", [1, 5, 6, 60, 100])
def test_an_episode_that_fills_its_room_ends_with_a_drawn_token(make: Make, policy: Path, tokens_max: int) -> None:
    """One token; a whole turn; a turn and no room for the answer; cut in a turn; no room for another turn."""
    engine = make()
    engine.load(policy, 1)
    (group,) = sample(engine, game(policy, SOKOBAN, max_new_tokens=tokens_max)).values()
    for one in group:
        found = checked(policy, SOKOBAN, one, tokens_max)
        assert one.finish == "length"
        assert found.sampled[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"episode": SOKOBAN.model_copy(update={"environment": "nethack"})}, "no environment"),
        ({"episode": LEDUC.model_copy(update={"parameters": {"opponent": "me"}})}, "opponent"),
        ({"prefixes": (Prefix(tokens=b"", finish=""),) * 5}, "cannot be continued"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name_and_costs_nothing_else(
    make: Make, policy: Path, change: dict[str, Any], message: str
) -> None:
    engine = make()
    engine.load(policy, 1)
    engine.add(game(policy, LEDUC, 1))
    with pytest.raises(Exception, match=message):
        engine.add(game(policy, LEDUC, 2).model_copy(update=change))
    assert [type(said) for said in run(engine)] == [GroupDone]


def test_an_environment_that_breaks_costs_its_own_group_only(
    make: Make, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = environments.ENVIRONMENTS["sokoban"]

    class Broken(whole):  # type: ignore[misc,valid-type]  # whatever it is
        def reset(self, seed: int) -> Any:
            room = super().reset(seed)
            if seed == 666:
                room._turns = None
            return room

    monkeypatch.setitem(environments.ENVIRONMENTS, "sokoban", Broken)
    engine = make()
    engine.load(policy, 1)
    engine.add(game(policy, SOKOBAN.model_copy(update={"seed": 666}), 1))
    engine.add(game(policy, SOKOBAN, 2))
    ended = {said.request_id: said for said in run(engine)}
    failed = ended["seed 1"]
    assert isinstance(failed, GroupFailed)
    assert failed.code == EnvironmentFailed.code
    assert isinstance(ended["seed 2"], GroupDone)


def test_a_policy_without_a_tokenizer_is_refused_by_name(make: Make, policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in policy.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    engine = make()
    assert engine.load(folder, 1).plays
    with pytest.raises(EngineFailed, match="tokenizer"):
        engine.add(game(policy, LEDUC))


def run(engine: Any) -> list[Any]:
    said = []
    while engine.busy:
        said += engine.step()
    return said
