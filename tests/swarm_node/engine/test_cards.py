"""The choice of graphics cards: what the driver reports, what the owner names, and what a card can hold."""

import pytest

from protocol.errors import ConfigInvalid
from swarm_node.engine.card_engine import UNLIMITED, JoinedPermit, joined_permit
from swarm_node.engine.cards import ON_CPU, engine_cards, free_bytes, free_on_joined, parse_cards, select_cards
from swarm_node.machine.gpu import Card, GpuProbe

GB = 10**9
LARGE = Card("nvidia", "RTX 4090", "580.65", 24 * GB, 1 * GB)
SEEN = GpuProbe(tuple(LARGE._replace(number=number) for number in range(3)))


def numbers(seen: GpuProbe) -> list[int]:
    return [card.number for card in seen.cards]


def test_all_cards_are_used_unless_the_owner_names_some() -> None:
    assert numbers(select_cards(SEEN, (), {}, on_card=True)) == [0, 1, 2]
    assert numbers(select_cards(SEEN, (2, 0), {}, on_card=True)) == [2, 0]
    with pytest.raises(ConfigInvalid, match="This machine has no card 7") as refused:
        select_cards(SEEN, (0, 7), {}, on_card=True)
    assert "1 (RTX 4090)" in refused.value.hint


def test_cards_that_the_environment_hides_are_left_alone() -> None:
    assert numbers(select_cards(SEEN, (), {"CUDA_VISIBLE_DEVICES": "1,2"}, on_card=True)) == [1, 2]
    assert numbers(select_cards(SEEN, (0,), {"CUDA_VISIBLE_DEVICES": "1"}, on_card=True)) == [0], "the owner's word"
    named = select_cards(SEEN, (), {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}, on_card=True)
    assert engine_cards(named) == ON_CPU, "one child, which obeys the variable itself"


def test_an_engine_on_the_cpu_is_one_child_whatever_cards_there_are() -> None:
    assert engine_cards(select_cards(SEEN, (), {}, on_card=False)) == ON_CPU
    with pytest.raises(ConfigInvalid, match="computes on the CPU"):
        select_cards(SEEN, (1,), {}, on_card=False)
    assert engine_cards(GpuProbe(trouble="nvidia-smi does not answer")) == ON_CPU


def test_a_card_that_cannot_hold_the_model_is_left_out_with_the_figures() -> None:
    small = LARGE._replace(name="GTX 1650", memory_bytes=4 * GB, number=1)
    unknown = LARGE._replace(memory_bytes=None, number=2)
    first, second, third = engine_cards(GpuProbe((LARGE, small, unknown)), 8 * GB)
    assert (first.left_out, third.left_out) == ("", "")
    assert second.left_out == "too small for this round's model: 3.0 GB free, about 8.0 GB needed"
    assert all(card.left_out for card in engine_cards(GpuProbe((LARGE, small)), 12 * GB, vram_share=0.5)[1:])


def test_each_child_sees_only_its_card() -> None:
    one = engine_cards(GpuProbe((LARGE._replace(number=3),)))[0]
    assert one.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3"}
    amd = engine_cards(GpuProbe((LARGE._replace(vendor="amd", number=1),)))[0]
    assert amd.environment == {"HIP_VISIBLE_DEVICES": "1", "GGML_VK_VISIBLE_DEVICES": "1"}
    assert engine_cards(GpuProbe((Card("apple", "Apple arm64"),)))[0].environment == {}


@pytest.mark.parametrize(("text", "cards"), [("", ()), ("0", (0,)), ("0,2", (0, 2)), ("2,2", (2,))])
def test_cards_are_named_by_their_numbers(text: str, cards: tuple[int, ...]) -> None:
    assert parse_cards(text) == cards


@pytest.mark.parametrize("text", ["0 1", "a", "0,,1", "-1", "1,", "9999"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="no list of numbers"):
        parse_cards(text)


OTHER_KIND = Card("nvidia", "RTX 3090", "580.65", 24 * GB, 0)


def kinds(*cards: Card) -> GpuProbe:
    return GpuProbe(tuple(card._replace(number=number) for number, card in enumerate(cards)))


def test_cards_are_joined_in_their_order_and_each_engine_sees_its_own() -> None:
    first, second = engine_cards(kinds(*[LARGE] * 4), 20 * GB, joined=2, why_joined="because")
    assert (first.numbers, second.numbers) == ((0, 1), (2, 3))
    assert first.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert (first.why_joined, first.left_out) == ("because", "")
    (amd,) = engine_cards(kinds(*[LARGE._replace(vendor="amd")] * 2), joined=2)
    assert amd.environment["HIP_VISIBLE_DEVICES"] == "0,1"


def test_only_cards_of_one_kind_are_joined_and_one_without_a_partner_is_left_out() -> None:
    cards = engine_cards(kinds(LARGE, OTHER_KIND, LARGE, OTHER_KIND, LARGE), 20 * GB, joined=2)
    assert [card.numbers for card in cards] == [(0, 2), (1, 3), (4,)]
    assert cards[2].left_out == "each engine needs 2 cards of one kind"
    assert engine_cards(kinds(LARGE, OTHER_KIND), 20 * GB, joined=2) == ON_CPU


def test_a_card_that_another_program_fills_is_not_joined() -> None:
    full = LARGE._replace(used_bytes=20 * GB)
    cards = engine_cards(kinds(LARGE, full, LARGE), 20 * GB, joined=2)
    assert [card.numbers for card in cards] == [(0, 2), (1,)]
    assert cards[1].left_out == (
        "too small for one of 2 parts of this round's model: 4.0 GB free, about 20.0 GB needed"
    )


def test_joined_cards_have_the_memory_of_the_fullest_among_the_best() -> None:
    full = LARGE._replace(used_bytes=20 * GB)
    seen = kinds(LARGE, full, LARGE, OTHER_KIND, LARGE)
    assert free_on_joined(seen) == {2: 23 * GB, 4: 4 * GB}
    assert free_on_joined(seen, vram_share=0.5) == {2: 12 * GB, 4: 4 * GB}
    assert free_bytes(seen) == 24 * GB
    assert free_on_joined(kinds(LARGE, OTHER_KIND)) == {}
    assert free_on_joined(kinds(*[LARGE._replace(memory_bytes=None)] * 2)) == {2: None}
    assert free_bytes(GpuProbe()) is None


def test_joined_cards_end_as_the_strictest_of_their_permits_says() -> None:
    hot = JoinedPermit(may_work=False, at_once=True)
    late = JoinedPermit(may_work=False, keep_engine=False)
    assert joined_permit([UNLIMITED, hot]) == hot
    assert joined_permit([late, hot]) == JoinedPermit(may_work=False, at_once=True, keep_engine=False)
    assert joined_permit([UNLIMITED, UNLIMITED]).may_work
