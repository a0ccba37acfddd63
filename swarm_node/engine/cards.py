"""Choice of the graphics cards that a node samples with: each gets an engine child of its own, or several get one.

- By default every card that the driver reports; fewer if the owner names some with `--cards`, or if the variable with
  which other programs are kept off a card (`CUDA_VISIBLE_DEVICES` and its kin) names some.
- An engine that computes on the CPU is one child, whatever cards there are.
- A card that cannot hold the round's model is left out, with the figures; the others work.
- If no card can hold it, vLLM joins cards of one kind: each holds a part of every layer (`precision` decides how many).
  All engines of a node have the same number of cards, and a card without a partner is left out.
- No I/O: the readings are arguments.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from protocol.limits import GB
from swarm_node.engine.vllm.command import JOINED
from swarm_node.machine.gpu import Card, GpuProbe, Vendor, only_cards


class EngineCard(NamedTuple):
    """A graphics card for one engine child, or several joined ones; without a name, the child's default device."""

    number: int = 0
    name: str = ""
    environment: Mapping[str, str] = MappingProxyType({})
    """Variables that make this card, and those joined to it, the only ones that the child sees."""
    left_out: str = ""
    """Reason why this node does not use the card; empty if it does."""
    others: tuple[int, ...] = ()
    """Numbers of the cards that are joined to this one."""
    why_joined: str = ""
    """Reason why cards are joined; empty if none is."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all cards of the child."""
        return (self.number, *self.others)


ON_CPU = (EngineCard(),)
"""One child, which chooses its device itself."""

SLICE_ALONE = "slices of a card (MIG) cannot be joined"

VISIBLE: Mapping[Vendor, str] = MappingProxyType({"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"})
"""Variables that name the cards a program may use."""


def parse_cards(text: str) -> tuple[int, ...]:
    """Return the numbers in a list such as `0,2`; empty if there are none."""
    if text and not re.fullmatch(r"\d{1,3}(,\d{1,3})*", text):
        raise ConfigInvalid(f"--cards {text}: this is no list of numbers.", hint="Write it as 0,2.")
    return tuple(dict.fromkeys(map(int, filter(None, text.split(",")))))


def select_cards(seen: GpuProbe, wanted: Sequence[int], environment: Mapping[str, str], *, on_card: bool) -> GpuProbe:
    """Return the cards to use of those that the driver reports; none if the engine computes on the CPU."""
    if not on_card:
        if wanted:
            raise ConfigInvalid(
                "--cards names graphics cards, but the engine computes on the CPU.",
                hint="`swarm-node doctor` says why; leave --cards out to use the CPU.",
            )
        return GpuProbe()
    known = {card.number: card for card in seen.cards}
    if unknown := [number for number in wanted if number not in known]:
        there = ", ".join(f"{card.number} ({card.name})" for card in seen.cards) or "none"
        raise ConfigInvalid(f"This machine has no card {unknown[0]}.", hint=f"It has these cards: {there}.")
    if wanted:
        return seen._replace(cards=tuple(known[number] for number in wanted))
    visible = environment.get(VISIBLE.get(seen.cards[0].vendor, "") if seen.cards else "", "")
    if not visible:
        return seen
    if not re.fullmatch(r"\d+(,\d+)*", visible):  # names such as GPU-8f2a…: one child obeys them by itself
        return GpuProbe()
    return seen._replace(cards=tuple(known[int(number)] for number in visible.split(",") if int(number) in known))


def engine_cards(
    seen: GpuProbe, need_bytes: int = 0, *, vram_share: float = 1.0, joined: int = 1, why_joined: str = ""
) -> tuple[EngineCard, ...]:
    """Return the cards for the engine children, `joined` for each; one with less than `need_bytes` free is left out."""
    cards: list[EngineCard] = []
    for kind in _kinds(seen):
        refused = {card: _too_small(card, need_bytes, vram_share, joined) for card in kind}
        cards += [EngineCard(card.number, card.name, left_out=reason) for card, reason in refused.items() if reason]
        able = [card for card, reason in refused.items() if not reason]
        if joined > 1 and any(card.slice_uuid for card in able):
            cards += [EngineCard(card.number, card.name, left_out=SLICE_ALONE) for card in able]
            continue
        for start in range(0, len(able), joined):
            cards += _joined_cards(able[start : start + joined], joined, why_joined)
    if all(card.left_out for card in cards):
        return ON_CPU
    places = [card.number for card in seen.cards]
    return tuple(sorted(cards, key=lambda card: places.index(card.number)))


def _joined_cards(cards: Sequence[Card], joined: int, why_joined: str) -> list[EngineCard]:
    """Return the cards of one child as one; all are left out if they are too few."""
    if len(cards) < joined:
        reason = f"each engine needs {joined} cards of one kind"
        return [EngineCard(card.number, card.name, left_out=reason) for card in cards]
    first, *others = cards
    numbers = tuple(card.number for card in others)
    return [EngineCard(first.number, first.name, only_cards(cards), others=numbers, why_joined=why_joined)]


def free_bytes(seen: GpuProbe, *, vram_share: float = 1.0) -> int | None:
    """Return the memory that an engine may use on the card with the most free memory; None if unknown."""
    return max((free for card in seen.cards if (free := _free(card, vram_share)) is not None), default=None)


def free_on_joined(seen: GpuProbe, *, vram_share: float = 1.0) -> dict[int, int | None]:
    """Return the memory that an engine may use on each of its cards, by the number of joined cards; None if unknown.

    A number for which the machine has too few cards of one kind is left out.
    """
    found: dict[int, int | None] = {}
    for kind in _kinds(seen):
        if any(card.slice_uuid for card in kind):
            continue
        known = sorted((free for card in kind if (free := _free(card, vram_share)) is not None), reverse=True)
        for joined in JOINED:
            if joined <= len(known):
                found[joined] = max(known[joined - 1], found.get(joined) or 0)
            elif joined <= len(kind):
                found.setdefault(joined, None)
    return found


def _kinds(seen: GpuProbe) -> list[list[Card]]:
    """Return the cards of each vendor and name."""
    kinds: dict[tuple[str, str], list[Card]] = {}
    for card in seen.cards:
        kinds.setdefault((card.vendor, card.name), []).append(card)
    return list(kinds.values())


def _free(card: Card, vram_share: float) -> int | None:
    """Return the memory of a card that an engine may use; None if unknown."""
    if card.memory_bytes is None:
        return None
    return min(card.memory_bytes - (card.used_bytes or 0), int(card.memory_bytes * vram_share))


def _too_small(card: Card, need_bytes: int, vram_share: float, joined: int) -> str:
    free = _free(card, vram_share)
    if free is None or free >= need_bytes:
        return ""
    part = f"one of {joined} parts of " if joined > 1 else ""
    return f"too small for {part}this round's model: {free / GB:.1f} GB free, about {need_bytes / GB:.1f} GB needed"
