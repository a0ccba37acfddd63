"""Transcripts: who plays and who checks get the same episode from the same tokens; what was edited is found by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import (
    EnvironmentFailed,
    EpisodeCutShort,
    EpisodeOverrun,
    FragmentMismatch,
    LogprobsInvalid,
    MalformedMessage,
    ObservationForged,
    SwarmError,
    TokensInvalid,
    UnknownEnvironment,
)
from protocol.tasks import chance, environments
from protocol.work.episode import PLAIN, Episode, Framing
from protocol.work.fragment import Fragment, FragmentPart, check_fragment
from protocol.work.lease import Lease
from protocol.work.rollout import PolicyBounds, RolloutClaim, Sample, check_claim, pack_logprobs, pack_tokens
from protocol.work.transcript import Player, prompt, replay

ROUND = "a" * 64
START, END = 256, 257
VOCAB, MAX = 258, 400
ENDS = frozenset({END})
GAMES: list[tuple[str, dict[str, int | str]]] = [
    ("kuhn", {"opponent": "cfr"}),
    ("leduc", {}),
    ("leduc", {"opponent": "random", "rules": 1}),
    ("sokoban", {"boxes": 2, "turns": 3}),
    ("holdem", {"players": 3, "stack": 20}),
]


class Bytes:
    """A tokenizer: bytes and two special tokens."""

    def encode(self, text: str) -> list[int]:
        parts = text.replace("<|im_start|>", "\ue000").replace("<|im_end|>", "\ue001")
        special = {"\ue000": [START], "\ue001": [END]}
        return [token for letter in parts for token in special.get(letter, list(letter.encode()))]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


CHATML = Framing(
    opening="<|im_start|>user\n", before="\n<|im_start|>user\n", after="<|im_end|>\n<|im_start|>assistant\n"
)
CODEC = Bytes()
BOUNDS = PolicyBounds(VOCAB, ENDS, MAX, CODEC)


def episode(
    game: int = 0, seed: int = 7, framing: Framing = PLAIN, turn_tokens_max: int = 12, **change: Any
) -> Episode:
    name, parameters = GAMES[game]
    fields: dict[str, Any] = {"environment": name, "parameters": parameters, "seed": seed}
    return Episode(**(fields | {"framing": framing, "turn_tokens_max": turn_tokens_max} | change))


def player(wanted: Episode, tokens_max: int = MAX) -> Player:
    return Player(wanted, CODEC, end_tokens=ENDS, tokens_max=tokens_max)


def played(wanted: Episode, policy: Callable[[int], int], tokens_max: int = MAX) -> tuple[list[int], list[bool], str]:
    """An episode as a node plays it: its tokens, which of them were drawn, how it finished."""
    one, tokens, drawn = player(wanted, tokens_max), list[int](), list[bool]()
    while not one.finish:
        token = policy(len(tokens))
        given = one.append(token)
        tokens += [token, *given]
        drawn += [True] + [False] * len(given)
    return tokens, drawn, one.finish


def speaker(wanted: Episode, seed: int) -> Callable[[int], int]:
    """A policy that mostly says what means something, and sometimes anything."""
    game = environments.environment(wanted.environment, wanted.parameters)
    turns = [[*CODEC.encode(turn), END] for turn in (*game.demonstration(wanted.seed), "call", "fold", "udlr", "")]
    queue: list[int] = []

    def speak(position: int) -> int:
        if not queue:
            queue.extend(turns[chance.below(len(turns), "turn", seed, position)])
        if chance.below(40, "noise", seed, position) == 0:
            return chance.below(VOCAB, "token", seed, position)
        return queue.pop(0)

    return speak


EPISODES = st.builds(
    episode,
    game=st.integers(0, len(GAMES) - 1),
    seed=st.integers(0, 2**63 - 1),
    framing=st.sampled_from([PLAIN, CHATML]),
    turn_tokens_max=st.integers(1, 20),
)


@given(EPISODES, st.integers(0, 10**6), st.integers(1, MAX))
def test_the_coordinator_gets_what_the_node_played(wanted: Episode, seed: int, tokens_max: int) -> None:
    tokens, drawn, finish = played(wanted, speaker(wanted, seed), tokens_max)
    found = replay(player(wanted, tokens_max), tokens)
    assert found.sampled.tolist() == drawn
    assert found.finish == finish
    assert found.reward == replay(player(wanted, tokens_max), tokens).reward
    assert drawn[-1]
    assert len(tokens) <= tokens_max


@given(EPISODES, st.integers(0, 10**6), st.data())
def test_an_edited_transcript_is_another_episode_or_none(wanted: Episode, seed: int, data: st.DataObject) -> None:
    """An edit where nothing was drawn is always found; one where something was cannot keep a forged answer."""
    tokens, drawn, _ = played(wanted, speaker(wanted, seed))
    place = data.draw(st.integers(0, len(tokens) - 1))
    edited = list(tokens)
    edited[place] = data.draw(st.integers(0, VOCAB - 1).filter(lambda token: token != tokens[place]))
    try:
        found = replay(player(wanted), edited)
    except (ObservationForged, EpisodeOverrun, EpisodeCutShort):
        return
    assert drawn[place]
    again, one = list[int](), player(wanted)
    for token, mine in zip(edited, found.sampled, strict=True):
        if mine:
            again += [token, *one.append(token)]
    assert again == edited


def two_turns() -> tuple[Episode, list[int], int]:
    """An episode with an observation in it, and where that begins."""
    for seed in range(100):
        wanted = episode(1, seed)
        tokens, drawn, finish = played(wanted, scripted("call"))
        if not all(drawn) and finish == "stop":
            return wanted, tokens, drawn.index(False)
    raise AssertionError


def scripted(turn: str) -> Callable[[int], int]:
    said = iter([*CODEC.encode(turn), END] * 50)
    return lambda _: next(said)


def claim(wanted: Episode, tokens: list[int], finish: Literal["stop", "length"] = "stop", **change: Any) -> None:
    """Check a claim with this sample."""
    lease = Lease(
        lease_id="1" * 32,
        version=3,
        seed=7,
        samples=1,
        prompt=pack_tokens(prompt(wanted, CODEC)),
        price_micros_per_mtok=1,
        expires_ms=0,
        episode=wanted,
    )
    logprobs = change.get("logprobs", [0.0] * len(tokens))
    sample = Sample(tokens=pack_tokens(tokens), logprobs=pack_logprobs(logprobs), finish=finish)
    whole = RolloutClaim(round_id=ROUND, lease_id="1" * 32, lease_digest=lease.digest, samples=(sample,))
    (found,) = check_claim(whole, lease, ROUND, BOUNDS)
    assert found.paid_tokens == found.sampled.sum() < len(tokens)


def test_a_whole_episode_passes_and_only_what_was_drawn_is_paid() -> None:
    wanted, tokens, _ = two_turns()
    claim(wanted, tokens)


def test_a_forged_observation_is_refused() -> None:
    """A node that has the environment deal it a better board."""
    wanted, tokens, place = two_turns()
    with pytest.raises(ObservationForged):
        claim(wanted, [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]])


def test_a_left_out_observation_is_refused() -> None:
    wanted, tokens, place = two_turns()
    with pytest.raises((ObservationForged, EpisodeCutShort)):
        claim(wanted, tokens[:place] + tokens[-5:])


def test_an_episode_that_goes_on_after_its_end_is_refused() -> None:
    """Padding, to be paid for more tokens."""
    wanted, tokens, _ = two_turns()
    with pytest.raises(EpisodeOverrun):
        claim(wanted, [*tokens, *CODEC.encode("call"), END])


@pytest.mark.parametrize("where", ["after the turn", "in the observation", "before the observation", "in the turn"])
def test_an_episode_that_is_left_when_it_goes_badly_is_refused(where: str) -> None:
    wanted, tokens, place = two_turns()
    end = next(place + count for count in range(1, 99) if tokens[place + count - 1 : place + count] == [ord(">")])
    cut = {"after the turn": place, "in the observation": place + 1, "before the observation": end}.get(where, 2)
    with pytest.raises(EpisodeCutShort):
        claim(wanted, tokens[:cut])


def test_another_finish_than_the_episodes_is_refused() -> None:
    wanted, tokens, _ = two_turns()
    with pytest.raises(TokensInvalid):
        claim(wanted, tokens, "length")


def test_a_chance_for_what_nobody_drew_is_refused() -> None:
    """It would hide what the node claims for its own tokens in a mean."""
    wanted, tokens, place = two_turns()
    with pytest.raises(LogprobsInvalid):
        claim(wanted, tokens, logprobs=[-0.5 * (number == place) for number in range(len(tokens))])


def test_another_seed_is_another_episode() -> None:
    wanted, tokens, _ = two_turns()
    refused = 0
    for seed in range(20):
        try:
            claim(wanted.model_copy(update={"seed": seed}), tokens)
        except SwarmError:
            refused += 1
    assert refused >= 15


def test_special_tokens_in_a_turn_end_it_or_spoil_it() -> None:
    """A policy that writes its opponent's part is not believed: the environment reads it as one turn."""
    wanted = episode(1, two_turns()[0].seed, framing=CHATML)
    forged = iter([*CODEC.encode("raise"), START, *CODEC.encode("user\nthey fold\n"), END])
    one = player(wanted.model_copy(update={"turn_tokens_max": 64}))
    while not one.finish:
        one.append(next(forged))
    assert one.reward().status == "invalid"


@pytest.mark.parametrize(
    "change",
    [
        {"environment": "nethack"},
        {"parameters": {"opponent": "an_oracle"}},
        {"parameters": {"opponent": 1}},
        {"parameters": {"rules": "1"}},
        {"parameters": {"code": "import os"}},
    ],
    ids=str,
)
def test_what_is_not_built_in_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownEnvironment):
        player(episode(1, **change))


@pytest.mark.parametrize(
    "change",
    [{"environment": "../leduc"}, {"environment": ""}, {"seed": -1}, {"seed": 2**63}, {"turn_tokens_max": 0}],
    ids=str,
)
def test_an_episode_that_is_none_is_no_message(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        Episode.from_value(episode().model_dump() | change)


def test_a_fragment_of_an_episode_is_refused() -> None:
    wanted, tokens, place = two_turns()
    lease = Lease(
        lease_id="1" * 32, version=3, seed=7, samples=1, prompt=pack_tokens([1]), price_micros_per_mtok=1,
        expires_ms=0, episode=wanted,
    )  # fmt: skip
    part = FragmentPart(
        sample=0, start=0, tokens=pack_tokens(tokens[:place]), logprobs=pack_logprobs([0.0] * place), finish=""
    )
    told = Fragment(round_id=ROUND, lease_id="1" * 32, lease_digest=lease.digest, previous="", parts=(part,))
    with pytest.raises(FragmentMismatch, match="has no fragments"):
        check_fragment(told, lease, ROUND, BOUNDS, before=(), head="")


def test_a_broken_environment_is_our_fault_and_not_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Broken:
        def reset(self, seed: int) -> Any:
            raise ZeroDivisionError

    monkeypatch.setitem(environments.ENVIRONMENTS, "kuhn", Broken)
    with pytest.raises(EnvironmentFailed) as raised:
        player(episode(0, parameters={}))
    assert raised.value.fault == "coordinator"


def test_every_sampled_position_is_known_from_the_tokens_alone() -> None:
    wanted, tokens, place = two_turns()
    found = replay(player(wanted), tokens)
    assert np.flatnonzero(~found.sampled)[0] == place
