"""Answers of the swarm: samples with the version that drew them, versions, and the budget of a key. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """A completion, exact to the token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token at the round's temperature, as the node computed it."""
    text: str
    finish_reason: str
    """`stop` if it ended itself, `length` if it reached the limit of tokens."""
    receipt: str
    """The claim that the node is paid for; the round's public ledger has it."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and its samples, all drawn by one version."""

    prompt_token_ids: tuple[int, ...]
    samples: tuple[RolloutSample, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of a round."""

    newest: int
    newest_update: int
    """The training steps that the newest version has."""
    max_staleness: int
    """S: a node samples no version that is more updates behind the newest one."""
    held: Mapping[int, int]
    """The number of live nodes that hold each version that may still be sampled."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of an API key, in millionths of the round's unit."""

    total_micros: int
    spent_micros: int
    reserved_micros: int
    """The cost of the open queries at their dearest."""
    may_publish: bool

    @property
    def left_micros(self) -> int:
        """Return what new queries may cost."""
        return max(0, self.total_micros - self.spent_micros - self.reserved_micros)


def read_rollout(body: Mapping[str, Any]) -> Rollout:
    """Read the answer to a request with one prompt, of a completion or of a chat."""
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    prompt = body.get("prompt_token_ids") or choices[0]["prompt_token_ids"]
    return Rollout(tuple(prompt), tuple(map(_read_sample, choices)), int(body["version"]))


def read_versions(body: Mapping[str, Any]) -> Versions:
    """Read the answer of `/v1/trainer/versions`."""
    held = {entry["version"]: entry["nodes"] for entry in body["held"]}
    return Versions(body["newest_version"], body["newest_update"], body["max_staleness"], held)


def read_budget(body: Mapping[str, Any]) -> Budget:
    """Read the answer of `/v1/key`."""
    return Budget(body["budget_micros"], body["spent_micros"], body["reserved_micros"], body["publishes"])


def _read_sample(choice: Mapping[str, Any]) -> RolloutSample:
    said = choice["logprobs"]
    logprobs = said["token_logprobs"] if "token_logprobs" in said else [token["logprob"] for token in said["content"]]
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return RolloutSample(tuple(choice["token_ids"]), tuple(logprobs), text, choice["finish_reason"], choice["receipt"])
