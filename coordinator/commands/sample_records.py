"""Sampled rollouts as text: prompts, completions, rewards and advantages. Only reads the store.

- Samples come one at a time, those of the newest group first.
- A group's advantages are those of its training: shown when it is in a batch and they follow from the group alone. With
  a baseline or deviation of the whole batch they are unknown here.
- Text is decoded with the policy's tokenizer. It is untrusted: `coordinator.base.terminal` makes it safe to print.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite
from typing import Any

import sqlalchemy as sa

from coordinator.audit.case import RoundArchive
from coordinator.config import Config
from coordinator.learner.settings import algorithm
from coordinator.reports import moderation
from coordinator.rules.lifecycle import RolloutState
from coordinator.store import schema
from coordinator.store.tables import leases, nodes, rollouts
from coordinator.tasks.task_text import policy_bounds
from coordinator.transactions import batches, policy_versions, reward_columns, scoring
from protocol.errors import ConfigInvalid
from protocol.people.names import nickname
from protocol.policy.codec import PolicyCodec
from protocol.tasks import Reward
from protocol.work.learning import TrainingGroup
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens

Decode = Callable[[Sequence[int]], str]
Worth = Callable[[TrainingGroup], Sequence[float] | None]
"""A function that returns the advantages of a group, or None if they are unknown."""


@dataclass(frozen=True)
class SampleFilter:
    """A filter of samples; all its conditions must hold."""

    version: int = 0
    """Version of the sample; 0: any."""
    node: str = ""
    lowest: float = -inf
    highest: float = inf
    text: re.Pattern[str] | None = None
    """Pattern that must occur in the prompt or the completion."""

    def takes(self, reward: Reward | None) -> bool:
        """Return True if a reward is in the range; an unknown reward is in no given range."""
        if (self.lowest, self.highest) == (-inf, inf):
            return True
        return reward is not None and reward.status != "verifier_error" and self.lowest <= reward.score <= self.highest


@dataclass(frozen=True)
class Shown:
    """A sample with its prompt, completion, reward and origin."""

    claim_id: str
    sample: int
    """Number of the sample in its group, from 0."""
    node_id: str
    name: str
    nickname: str
    version: int
    update: int
    """Number of updates at the publication of its version."""
    trained_in: int | None
    """The update in which it was trained on."""
    state: str
    accepted_ms: int
    prompt: str
    completion: str
    reward: float | None
    status: str
    """ok, invalid or verifier_error; unscored while there is no reward."""
    components: dict[str, float | None]
    advantage: float | None


def of_round(archive: RoundArchive, config: Config, wanted: SampleFilter, limit: int) -> list[Shown]:
    """Return the newest matching samples of a round, decoded with its newest version's tokenizer."""
    archive.read(_require_today)
    version, _ = archive.read(policy_versions.newest_version)
    if not version:
        return []

    def read_file(name: str) -> bytes:
        return archive.publisher.read_file(version, name)

    bounds = policy_bounds(read_file, config.sampling.max_new_tokens)
    objective = algorithm(config)

    def worth(group: TrainingGroup) -> Sequence[float] | None:
        from coordinator.learner.advantages import of_group  # imports torch, which most of a coordinator does not need

        return of_group(group, objective, ends=sorted(bounds.end_tokens), longest=bounds.max_new_tokens)

    codec = PolicyCodec(read_file("tokenizer.json").decode())
    return archive.read(find, wanted, limit, codec.decode, worth)


def find(connection: sa.Connection, wanted: SampleFilter, limit: int, decode: Decode, worth: Worth) -> list[Shown]:
    """Return the newest matching samples, at most `limit`."""
    samples = (
        sample for row in _rows(connection, wanted) for sample in _samples(connection, row, wanted, decode, worth)
    )
    return list(islice(samples, limit))


def _require_today(connection: sa.Connection) -> None:
    """Raise an error for a store of another schema, or without tables, which a reader must not create."""
    if schema.stored_number(connection) is None:
        raise ConfigInvalid("The store of this round has no tables.", hint="Launch the round first.")
    schema.open_store(connection)


def _rows(connection: sa.Connection, wanted: SampleFilter) -> Iterator[Mapping[str, Any]]:
    """Yield the groups, newest first. All claim ids are read at once, their rows one by one."""
    query = sa.select(rollouts.c.claim_id).order_by(rollouts.c.accepted_ms.desc(), rollouts.c.claim_id)
    if wanted.version:
        query = query.where(rollouts.c.version == wanted.version)
    if wanted.node:
        query = query.where(rollouts.c.node_id == moderation.find(connection, wanted.node))
    whole = (
        sa.select(rollouts, leases.c.offer, leases.c.continues, nodes.c.name)
        .join_from(rollouts, leases, rollouts.c.lease_id == leases.c.lease_id)
        .join(nodes, nodes.c.node_id == rollouts.c.node_id)
    )
    for claim_id in connection.execute(query).scalars().all():
        yield dict(connection.execute(whole.where(rollouts.c.claim_id == claim_id)).mappings().one())


def _samples(
    connection: sa.Connection, row: Mapping[str, Any], wanted: SampleFilter, decode: Decode, worth: Worth
) -> Iterator[Shown]:
    rewards = reward_columns.read(row)
    of_samples: list[Reward | None] = [*rewards] or [None] * (len(row["rewards"]) // 4)
    taken = [number for number, reward in enumerate(of_samples) if wanted.takes(reward)]
    if not taken:
        return
    prompt = decode(unpack_tokens(Lease.from_bytes(row["offer"]).prompt).tolist())
    completions = scoring.completions(row["envelope"], row["offer"])
    said = {number: decode(completions[number]) for number in taken}
    if wanted.text is not None and not wanted.text.search(prompt):
        said = {number: text for number, text in said.items() if wanted.text.search(text)}
    if not said:
        return
    advantages = (
        worth(batches.group(connection, batches.StoredRollout.from_mapping(row)))
        if row["state"] == RolloutState.BATCHED
        else None
    )
    for number, text in said.items():
        yield _shown(row, number, prompt, text, of_samples[number], advantages[number] if advantages else None)


def _shown(
    row: Mapping[str, Any], number: int, prompt: str, completion: str, reward: Reward | None, advantage: float | None
) -> Shown:
    judged = reward is not None and reward.status != "verifier_error"
    return Shown(
        claim_id=row["claim_id"],
        sample=number,
        node_id=row["node_id"],
        name=row["name"],
        nickname=nickname(row["node_id"]),
        version=row["version"],
        update=row["policy_update"],
        trained_in=row["batch"],
        state=row["state"],
        accepted_ms=row["accepted_ms"],
        prompt=prompt,
        completion=completion,
        reward=_finite(reward.score) if reward and judged else None,
        status=reward.status if reward else RolloutState.UNSCORED.value,
        components={name: _finite(value) for name, value in reward.components.items()} if reward else {},
        advantage=_finite(advantage) if advantage is not None else None,
    )


def _finite(value: float) -> float | None:
    """Return a finite value, else None: JSON has no other numbers."""
    return value if isfinite(value) else None
