"""One graphics card of the pool: its child, the groups that it samples, its state, and the owner's permission.

- A group remembers the tokens that it has reported, so that another card continues after them.
- With vLLM, several cards may be joined for one child: they work, rest and fail together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import trio

from protocol.errors import EngineFailed, SwarmError
from protocol.work.fragment import Begun
from protocol.work.lease import Prefix
from swarm_node.engine.cards import EngineCard
from swarm_node.engine.client import Choose, EngineClient
from swarm_node.engine.messages import GroupDone, GroupGrown, Loaded, SampleRequest
from swarm_node.engine.throughput import SampleWork


def card_names(card: EngineCard) -> str:
    """Return `card 0`, or `cards 0 and 1`."""
    *most, last = map(str, card.numbers)
    return f"cards {', '.join(most)} and {last}" if most else f"card {last}"


class CardPermit(Protocol):
    """The owner's permission for one card."""

    @property
    def may_work(self) -> bool: ...

    @property
    def at_once(self) -> bool:
        """True if running groups leave the card at once."""

    @property
    def keep_engine(self) -> bool:
        """True if the child stays in memory while the card rests."""


class JoinedPermit(NamedTuple):
    """The permission of joined cards, as one; by default without limits."""

    may_work: bool = True
    at_once: bool = False
    keep_engine: bool = True


UNLIMITED = JoinedPermit()


def joined_permit(permits: Sequence[CardPermit]) -> CardPermit:
    """Return the permission of joined cards: all must be permitted to work, and those that are not say how it ends."""
    resting = [permit for permit in permits if not permit.may_work]
    if len(resting) < 2:
        return next(iter((*resting, *permits)))
    return JoinedPermit(
        may_work=False,
        at_once=any(permit.at_once for permit in resting),
        keep_engine=all(permit.keep_engine for permit in resting),
    )


@dataclass(eq=False)
class LoadTarget:
    """The policy that all cards load."""

    folder: Path
    version: int
    warm_up: SampleWork | None
    """Samples that measure a card's speed when it is not known yet."""
    choose: Choose | None = None
    """Chooses the engine for the policies of this target's round; None: the client's choice."""
    numerics: str = ""
    """The class of numerics of this node; empty until the first card has loaded the policy."""


@dataclass(eq=False)
class PlacedGroup:
    """A group that the pool samples, with the tokens that its cards have reported."""

    request: SampleRequest
    """The request that the caller submitted."""
    reported: dict[int, Begun] = field(default_factory=dict)
    """Reported tokens by sample number."""
    base: dict[int, Begun] = field(default_factory=dict)
    """The part of them that the present card got as a prefix."""
    deaths: int = 0
    """Cards that failed under this group."""

    def continued(self) -> SampleRequest:
        """Return the request that continues after the reported tokens, and make them the base."""
        self.base = dict(self.reported)
        if not self.base:
            return self.request
        old = self.request.prefixes or [Prefix(tokens=b"", finish="")] * self.request.samples
        begun = [self.base.get(number, Begun()) for number in range(self.request.samples)]
        prefixes = tuple(
            Prefix(tokens=prefix.tokens + part.tokens, finish=prefix.finish or part.finish)
            for prefix, part in zip(old, begun, strict=True)
        )
        return self.request.model_copy(update={"prefixes": prefixes})

    def grew(self, answer: GroupGrown) -> GroupGrown:
        """Record new tokens; return the report as if one card had sampled the whole group."""
        parts = []
        for part in answer.parts:
            before = self.reported.get(part.sample, Begun())
            self.reported[part.sample] = Begun(
                before.tokens + part.tokens, before.logprobs + part.logprobs, part.finish
            )
            start = part.start + self.base.get(part.sample, Begun()).count
            parts.append(part.model_copy(update={"start": start}))
        return answer.model_copy(update={"parts": tuple(parts)})

    def done(self, answer: GroupDone) -> GroupDone:
        """Return the whole group: its samples after the base, with the base."""
        samples = []
        for number, sample in enumerate(answer.samples):
            before = self.base.get(number, Begun())
            whole = {"tokens": before.tokens + sample.tokens, "logprobs": before.logprobs + sample.logprobs}
            samples.append(sample.model_copy(update=whole))
        return answer.model_copy(update={"samples": tuple(samples)})


@dataclass(eq=False)
class CardEngine:
    """One card of the pool: its child, the groups that it samples, and its state."""

    card: EngineCard
    client: EngineClient
    permit: CardPermit = UNLIMITED
    loaded: LoadTarget | None = None
    result: Loaded | None = None
    tried: LoadTarget | None = None
    """The target of the last attempt to load, successful or not."""
    barred: LoadTarget | None = None
    """A target with which the card does not work: it failed too often, or has another class of numerics."""
    groups: dict[str, PlacedGroup] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)
    """Requests that the child must cancel: their groups have moved."""
    tokens_per_s: float = 0.0
    speeds: dict[Choose | None, float] = field(default_factory=dict)
    """The last speed in each round, by the round's choice of the engine."""
    failures: int = 0
    retry_at: float = 0.0
    error: SwarmError | None = None
    """The last failure, until a group ends."""
    preparing: trio.CancelScope | None = None

    def load_share(self, more: int) -> float:
        """Return the groups on this card, `more` included, in proportion to its speed."""
        return (len(self.groups) + more) / (self.tokens_per_s or 1.0)

    @property
    def state(self) -> str:
        """The card's state in one word."""
        if self.card.left_out:
            return "left out"
        if not self.permit.may_work and not self.groups:
            return "resting"
        if self.groups:
            return "sampling"
        if self.preparing:
            return "loading"
        return "idle" if self.loaded else "failed" if self.error else "empty"

    def card_state(self, number: int) -> dict[str, Any]:
        """Return the state of one of its cards as plain values; the first of joined cards has their figures."""
        is_first = number == self.card.number
        reason = self.card.left_out or str(self.error or "") or self.card.why_joined
        return {
            "number": number,
            "name": self.card.name,
            "state": self.state,
            "reason": reason if is_first else f"joined to card {self.card.number}, whose line has their figures",
            "tokens_per_s": self.tokens_per_s if is_first and not self.card.left_out else 0.0,
            "groups": len(self.groups) if is_first else 0,
            "pid": self.client.pid,
        }

    @property
    def label(self) -> str:
        """The name of the card, or of the joined cards, in the log."""
        return f"{card_names(self.card)} ({self.card.name})" if self.card.name else "the engine"

    def class_error(self, numerics: str) -> EngineFailed | None:
        """Return why the card cannot sample in a class of numerics; None if it does, or the class is not known yet."""
        own = self.result.numerics if self.result else ""
        if not numerics or own == numerics:
            return None
        return EngineFailed(
            f"It samples in the class {own}, and this node in {numerics}.",
            hint="A second agent with another --home and "
            f"`--cards {','.join(map(str, self.card.numbers))}` can use it.",
        )

    def stop_preparing(self) -> None:
        if self.preparing is not None:
            self.preparing.cancel()
