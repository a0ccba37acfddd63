"""The phrase of a round: frozen by golden vectors, long enough, and forgiving to whoever types it."""

from hashlib import sha256

import pytest

from protocol.policy.phrase import BITS, COUNT, is_phrase_of, phrase
from protocol.text.word_list import WORDS

LIST_SHA256 = "2f5eed53a4727b4bf8880d8f3f199efc90e58503646d9ff8eff3a2ed3b24dbda"
"""Digest of the published English list of BIP-39, one word a line."""


def test_the_list_is_the_published_one() -> None:
    assert sha256("".join(f"{word}\n" for word in WORDS).encode()).hexdigest() == LIST_SHA256
    assert len(WORDS) == len({word[:4] for word in WORDS}) == 2**BITS


def test_a_phrase_has_at_least_64_bits() -> None:
    assert COUNT * BITS >= 64


@pytest.mark.parametrize(
    ("fingerprint", "words"),
    [
        ("a" * 64, "omit grace own collect field oil"),
        ("0" * 64, "patrol fix buyer ceiling genius crumble"),
    ],
)
def test_golden_vectors(fingerprint: str, words: str) -> None:
    assert phrase(fingerprint) == words


@pytest.mark.parametrize("text", ["omit grace own collect field oil", " Omit, GRACE own-collect\tfield  oil.\n"])
def test_case_and_punctuation_do_not_count(text: str) -> None:
    assert is_phrase_of(text, "a" * 64)


@pytest.mark.parametrize(
    "text",
    ["", "omit grace own collect field", "grace omit own collect field oil", "omit grace own collect field oil oil"],
)
def test_another_phrase_is_none(text: str) -> None:
    assert not is_phrase_of(text, "a" * 64)
