"""Choice of the graphics cards that a node samples with: each gets an engine child of its own.

- By default every card that the driver reports; fewer if the owner names some with `--cards`, or if the variable with
  which other programs are kept off a card (`CUDA_VISIBLE_DEVICES` and its kin) names some.
- An engine that computes on the CPU is one child, whatever cards there are.
- A card that cannot hold the round's model is left out, with the figures; the others work.
- No I/O: the readings are arguments.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from protocol.errors import ConfigInvalid
from swarm_node.engine.card_engine import EngineCard
from swarm_node.machine.gpu import Card, GpuProbe, Vendor, only_card

GB = 10**9

ON_CPU = (EngineCard(),)
"""One child, which chooses its device itself."""

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


def engine_cards(seen: GpuProbe, need_bytes: int = 0, *, vram_share: float = 1.0) -> tuple[EngineCard, ...]:
    """Return the cards for the engine children; one that has less than `need_bytes` of free memory is left out."""
    cards = tuple(
        EngineCard(card.number, card.name, only_card(card), _too_small(card, need_bytes, vram_share))
        for card in seen.cards
    )
    return cards if any(not card.left_out for card in cards) else ON_CPU


def _too_small(card: Card, need_bytes: int, vram_share: float) -> str:
    if card.memory_bytes is None:
        return ""
    free = min(card.memory_bytes - (card.used_bytes or 0), int(card.memory_bytes * vram_share))
    if free >= need_bytes:
        return ""
    return f"too small for this round's model: {free / GB:.1f} GB free, about {need_bytes / GB:.1f} GB needed"
