"""Replays of episodes: judged by what was drawn alone; the environment's part must be its own, token by token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coordinator.audit.case import Case, opened
from coordinator.audit.check import audit
from coordinator.audit.scorer import VersionScorer
from coordinator.rules import calibration
from coordinator.rules.verdict import AuditOutcome, AuditReport
from protocol.policy.codec import PolicyCodec
from protocol.policy.manifest import Sampler
from protocol.wire.signing import NodeKey
from protocol.work.auditing import CaseFile
from protocol.work.episode import Episode
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from protocol.work.transcript import prompt
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

NODE = NodeKey(b"\1" * 32)
ROUND, SEED, TOKENS_MAX, SAMPLES = "0" * 64, 7, 240, 3
EPISODE = Episode(environment="sokoban", parameters={"turns": 3}, seed=11, turn_tokens_max=6)
ENGINES: dict[str, Callable[[], Engine]] = {"torch": TorchEngine, "llama": lambda: LlamaEngine(dtype="float32")}


def asks(policy: Path) -> bytes:
    return pack_tokens(prompt(EPISODE, PolicyCodec((policy / "tokenizer.json").read_text())))


@pytest.fixture(scope="module", params=ENGINES)
def played(policy: Path, request: pytest.FixtureRequest) -> tuple[Sample, ...]:
    """A group as an honest node plays it."""
    engine, done = ENGINES[request.param](), list[GroupDone]()
    engine.load(policy, 1)
    wanted = SampleRequest(
        request_id="a", version=1, prompt=asks(policy), seed=SEED, samples=SAMPLES, max_new_tokens=TOKENS_MAX,
        temperature=1.0, episode=EPISODE,
    )  # fmt: skip
    engine.generate([wanted], done.append)
    return done[0].samples


def case(policy: Path, samples: tuple[Sample, ...]) -> Case:
    lease = Lease(
        lease_id="0" * 32, version=1, seed=SEED, samples=SAMPLES, prompt=asks(policy), price_micros_per_mtok=1,
        expires_ms=1, episode=EPISODE,
    )  # fmt: skip
    claim = RolloutClaim(round_id=ROUND, lease_id="0" * 32, lease_digest=lease.digest, samples=samples)
    rollout = NODE.seal("rollout", claim.to_bytes())
    sampler = Sampler(temperature=1.0, max_new_tokens=TOKENS_MAX)
    return opened(
        CaseFile(round_id=ROUND, lease=lease.to_bytes(), rollout=rollout, fragments=(), sampler=sampler), policy, []
    )


def judged(policy: Path, samples: tuple[Sample, ...]) -> AuditReport:
    scorer = VersionScorer(policy)
    (report,) = audit(
        [case(policy, samples)],
        lambda _, claims: scorer.score(claims),
        calibration.read(calibration.SHIPPED),
        "torch/fp32/cpu",
    )
    return report


def edited(sample: Sample, place: int, token: int) -> Sample:
    tokens = unpack_tokens(sample.tokens).copy()
    tokens[place] = token
    return sample.model_copy(update={"tokens": pack_tokens(tokens)})


def test_an_honest_episode_passes_and_only_what_was_drawn_is_measured(policy: Path, played: tuple[Sample, ...]) -> None:
    report = judged(policy, played)
    assert report.outcome == AuditOutcome.PASS
    drawn = sum(said.paid_tokens for said in case(policy, played).completions())
    assert report.summary.positions == drawn < sum(len(one.tokens) // 4 for one in played)
    assert report.summary.error_max < 1e-4


def test_a_move_that_the_seed_did_not_dictate_fails(policy: Path, played: tuple[Sample, ...]) -> None:
    """The player improves a move: the transcript is a possible game, but not the one that was to be drawn."""
    drawn = np.flatnonzero(case(policy, played).completions()[0].sampled)
    end, moves = 2, PolicyCodec((policy / "tokenizer.json").read_text()).encode("u")
    place = next(int(at) for at in drawn[:4] if unpack_tokens(played[0].tokens)[at] not in (end, moves[0]))
    report = judged(policy, (edited(played[0], place, moves[0]), *played[1:]))
    assert report.outcome == AuditOutcome.HARD
    assert {finding.rule for finding in report.findings} <= {"token", "tokens", "logprob", "logprobs", "mean", "form"}


def test_a_room_that_was_made_easier_fails_by_form(policy: Path, played: tuple[Sample, ...]) -> None:
    sampled = case(policy, played).completions()[0].sampled
    place = int(np.flatnonzero(~sampled)[3])
    report = judged(policy, (edited(played[0], place, int(unpack_tokens(played[0].tokens)[place]) ^ 1), *played[1:]))
    assert [finding.rule for finding in report.findings] == ["form"]
    assert "observation_forged" in report.findings[0].observed


def test_a_chance_where_nothing_was_drawn_fails_by_form(policy: Path, played: tuple[Sample, ...]) -> None:
    logprobs = np.frombuffer(played[0].logprobs, "<f4").copy()
    logprobs[int(np.flatnonzero(~case(policy, played).completions()[0].sampled)[0])] = -1.0
    forged = played[0].model_copy(update={"logprobs": pack_logprobs(logprobs)})
    assert "logprobs_invalid" in judged(policy, (forged, *played[1:])).findings[0].observed
