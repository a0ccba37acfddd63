"""Descriptions of rounds: bounded, visible, and bound to their round and hash."""

import pytest
from pydantic import ValidationError

from coordinator.config.round import RoundSection
from protocol import limits
from protocol.errors import MalformedMessage, UntrustedMetadata
from protocol.policy.description import RoundDescription, description_path, find_description, open_description

ROUND = "ab" * 32
TEXTS = ("title", "description", "purpose", "licence", "operator", "contact")


def described(**texts: str) -> RoundDescription:
    return RoundDescription.from_value({"round_id": ROUND, **dict.fromkeys(TEXTS, ""), **texts})


def test_a_description_comes_back_from_its_bytes() -> None:
    said = described(title="Räts & <Reason>", contact="ops@example.org")
    data = said.to_bytes()
    assert open_description(data, description_path(data), ROUND) == said


def test_longest_texts_fit_the_document() -> None:
    widest = "\U0001f98a"
    chars = {"title": limits.ROUND_TITLE_MAX_CHARS} | dict.fromkeys(
        ("description", "purpose"), limits.ROUND_TEXT_MAX_CHARS
    )
    data = described(**{name: widest * chars.get(name, limits.ROUND_FACT_MAX_CHARS) for name in TEXTS}).to_bytes()
    assert len(data) <= limits.DESCRIPTION_MAX_BYTES
    assert open_description(data, description_path(data), ROUND).title == widest * limits.ROUND_TITLE_MAX_CHARS


@pytest.mark.parametrize("text", ["two\nlines", "\u202eevil", " ends", "a\x1b[31m", "\u200b", "Z" + "\u0335" * 9])
@pytest.mark.parametrize("name", TEXTS)
def test_invisible_characters_are_refused_in_the_file_and_in_the_document(name: str, text: str) -> None:
    with pytest.raises(ValidationError, match="visible characters"):
        RoundSection.model_validate({name: text})
    with pytest.raises(MalformedMessage, match="visible characters"):
        described(**{name: text})


@pytest.mark.parametrize("name", TEXTS)
def test_too_long_texts_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="at most"):
        RoundSection.model_validate({name: "a" * (limits.ROUND_TEXT_MAX_CHARS + 1)})


def test_a_changed_description_is_refused() -> None:
    data, other = described(title="honest").to_bytes(), described(title="forged").to_bytes()
    with pytest.raises(UntrustedMetadata, match="hash"):
        open_description(other, description_path(data), ROUND)


def test_a_description_of_another_round_is_refused() -> None:
    data = described(title="honest").to_bytes()
    with pytest.raises(UntrustedMetadata, match="another round"):
        open_description(data, description_path(data), "cd" * 32)


def test_only_a_description_is_found_among_targets() -> None:
    path = description_path(b"a")
    assert find_description(["policy-000000000001.manifest", f"../{path}", path]) == path
    assert find_description(["policy-000000000001.manifest"]) is None
