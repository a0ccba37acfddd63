"""Names: one form for each way to write one, and the same skeleton for all that look alike."""

import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.ids import NodeId
from protocol.limits import NAME_MAX_CHARS
from protocol.people import names
from protocol.people.names import CREATURES, QUALITIES, nickname
from protocol.text.plain import BLANK, MARKS, UNREADABLE
from protocol.wire.signing import NodeKey

NODE, OTHER = NodeKey(b"1" * 32).node_id, NodeKey(b"2" * 32).node_id

ANY_NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)

COPIES_OF_HERON = {
    "exact": "Heron",
    "case": "hERON",
    "Cyrillic": "H\u0435r\u043en",
    "Greek capitals": "\u0397\u0395RO\u039d",
    "full width": "\uff28\uff45\uff52\uff4f\uff4e",
    "mathematical": "\U0001d573\U0001d58a\U0001d597\U0001d594\U0001d593",
    "small capitals": "\u029c\u1d07\u0280\u1d0f\u0274",
    "circled": "\U0001f157\U0001f154\U0001f161\U0001f15e\U0001f15d",
    "flags": "\U0001f1ed\U0001f1ea\U0001f1f7\U0001f1f4\U0001f1f3",
    "digits": "Her0n",
    "other digits": "Her\u0660n",
    "zero width": "He\u200br\u2060on\u200d",
    "soft hyphen": "He\u00adron",
    "right to left": "\u202eHeron\u202c",
    "isolates": "\u2066Heron\u2069",
    "tags": "Heron\U000e0068\U000e0065",
    "variation selectors": "Her\ufe0fo\U000e0100n",
    "blank letters": "Heron\u3164\u2800\uffa0",
    "controls": "He\x08ron\x7f\r",
    "spaces": "\u00a0 H e\u2003r o n \u3000",
    "punctuation": "He-ron.",
    "accents": "He\u0301ro\u0323n",
    "letters with strokes": "\u0126er\u00f8n",
    "stacked marks": "H" + "\u0300" * 30 + "eron",
    "marks without a letter": "\u0301\u0301Heron",
    "brackets": "(Heron)",
    "modifiers": "Heron\u02bc\u02d0",
}


@pytest.mark.parametrize("copy", COPIES_OF_HERON.values(), ids=COPIES_OF_HERON)
def test_a_copy_of_a_name_has_its_skeleton(copy: str) -> None:
    assert names.skeleton(names.plain_name(copy)) == names.skeleton("Heron")


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("modern", "rnodern"),
        ("will", "vviII"),
        ("pace", "\u0440\u0430\u0441\u0435"),
        ("MOCKBA", "\u041c\u041e\u0421\u041a\u0412\u0410"),
        ("\u041c\u043e\u0441\u043a\u0432\u0430", "\u041c\u041e\u0421\u041a\u0412\u0410"),
        ("\u0397\u03bb\u03af\u03b1\u03c2", "\u03b7\u03bb\u03b9\u03b1\u03c3"),
        ("\u30ed\u30dc", "\u53e3\u30dc"),
        ("straße", "STRASSE"),
        ("\U0001f98a", "\U0001f98a\U0001f3fb"),
        ("***", "* * *"),
    ],
)
def test_these_two_look_alike(name: str, copy: str) -> None:
    assert names.skeleton(names.plain_name(copy)) == names.skeleton(names.plain_name(name))


@pytest.mark.parametrize(
    ("name", "another"),
    [
        ("rig1", "rig2"),
        ("heron", "herons"),
        ("\u5317\u4eac", "\u6771\u4eac"),
        ("\u0938\u0924\u094d\u092f", "\u0938\u0924\u0940"),
        ("\U0001f98a", "\U0001f980"),
        ("***", "---"),
    ],
)
def test_these_two_do_not_look_alike(name: str, another: str) -> None:
    assert names.skeleton(name) != names.skeleton(another)


def test_no_two_nicknames_look_alike() -> None:
    every = [f"{quality}-{creature}-{end}" for quality in QUALITIES for creature in CREATURES for end in ("017", "711")]
    assert len({names.skeleton(name) for name in every}) == len(every)
    assert len({names.skeleton(f"{number:03}") for number in range(1000)}) == 1000


@given(ANY_NAME)
@example("\u00b4" * 40)
@example("\ufdfa" * 40)
@example("e\u200d\u0301\u0301\u0301")
def test_a_plain_name_is_short_shows_and_stays_as_it_is(name: str) -> None:
    plain = names.plain_name(name)
    assert len(plain) <= NAME_MAX_CHARS
    assert plain == plain.strip()
    assert names.plain_name(plain).rstrip("….") == plain.rstrip("….")
    hidden = {"Cc", *UNREADABLE, *names.BRACKETS}
    assert not {unicodedata.category(character) for character in plain} & hidden
    assert not set(plain) & (BLANK | names.SELECTORS)
    assert unicodedata.category(plain[0]) not in MARKS if plain else True


@given(ANY_NAME, ANY_NAME)
def test_with_its_id_a_name_is_short_and_nobody_elses(name: str, another: str) -> None:
    plain, taken = names.plain_name(name), names.plain_name(another)
    shown = names.with_id(plain, NODE)
    assert len(shown) <= NAME_MAX_CHARS
    assert shown != taken
    assert shown != names.with_id(taken, OTHER)
    assert plain.startswith(names.without_id(shown))


@pytest.mark.parametrize("name", ["", "\u200b\u2800", "\u3164", "()", "\u202e", "\u0301"])
def test_what_shows_nothing_is_no_name(name: str) -> None:
    assert names.plain_name(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        "coordinator",
        "The Co\u043erdinator",
        "0perator",
        "round-\u0430dm\u0456n",
        "Echo Swarm team",
        "\uff21\uff24\uff2d\uff29\uff2e",
        "rig1@operator",
        "h\u0435ron",
        "ro\u03c9er",
        "4\u0661\u0967",
        "\u13bb\u13acron",
        nickname(OTHER),
        nickname(OTHER).replace("-", " ").upper(),
    ],
)
def test_a_name_that_imitates_whoever_is_there(name: str) -> None:
    assert names.is_imitation(names.plain_name(name), NODE)


@pytest.mark.parametrize(
    "name",
    [
        "rig1@heron",
        "\u0441\u0435\u0440\u0432\u0435\u0440-gpu1",
        "\u5317\u4eac GPU",
        "\u3055\u304f\u3089\u30b5\u30fc\u30d0\u30fc1",
        "\u0391\u03b8\u03ae\u03bd\u03b1",
        "\u0938\u0924\u094d\u092f",
        "\u0645\u062d\u0645\u062f",
        "M\u00fcller's Rechner",
        "\U0001f98a\U0001f980 \u043d\u043e\u0447\u044c \u591c",
        "localhost",
        nickname(NODE),
    ],
)
def test_an_honest_name_is_no_imitation(name: str) -> None:
    assert not names.is_imitation(names.plain_name(name), NODE)
    assert names.plain_name(name) == unicodedata.normalize("NFKC", name)


def test_ids_end_differently() -> None:
    assert len({NodeKey(number.to_bytes(32)).node_id[-names.ID_CHARS :] for number in range(1, 200)}) == 199
    assert NodeId(NODE)[-names.ID_CHARS :] in names.with_id("heron", NODE)


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
