"""Nicknames: frozen, the same everywhere, and made of anything."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.people.nicknames import CREATURES, QUALITIES, nickname
from protocol.wire.signing import NodeKey

GOLDEN = {
    NodeKey(bytes(32)).node_id: "sober-adder-379",
    NodeKey(b"1" * 32).node_id: "modest-owl-165",
    NodeKey(bytes(range(32))).node_id: "plain-bear-329",
    "": "level-otter-876",
}


@pytest.mark.parametrize(("node_id", "expected"), GOLDEN.items())
def test_golden_nicknames_never_change(node_id: str, expected: str) -> None:
    assert nickname(node_id) == expected


def test_every_word_is_there_once() -> None:
    for words in (QUALITIES, CREATURES):
        assert len(words) == len(set(words)) == 64
        assert list(words) == sorted(words)


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_has_a_plain_nickname(text: str) -> None:
    assert re.fullmatch(r"[a-z]+-[a-z]+-\d{3}", nickname(text))


def test_a_thousand_nodes_hardly_ever_share_one() -> None:
    assert len({nickname(str(number)) for number in range(1000)}) >= 998
