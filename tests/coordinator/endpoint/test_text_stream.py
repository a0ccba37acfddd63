"""Text of growing samples: together, the pieces are exactly the text, cut at the first stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.endpoint.sample_stream import DecodeWindow, SampleEnd, TextStream
from tests.coordinator.endpoint.vocabularies import END, TEXT, as_pieces, byte_pairs, pieces, token_texts

CODEC = byte_pairs()
WORDLESS = 400
"""A token beyond the vocabulary."""

TEXTS = st.lists(
    st.sampled_from([*TEXT.split(), " ", "\n", "\ufffd", "ab", "a", "b", "c", "aab", " the", "🙂", "界", "é"]),
    max_size=60,
).map("".join)
ANY_TOKENS = st.lists(st.one_of(st.integers(1, 329), st.just(WORDLESS)), max_size=120)
BYTES = st.lists(st.sampled_from(CODEC.encode("🙂界") + CODEC.encode("é") + [1, 130, 200, 255]), max_size=120)
TOKENS = st.one_of(TEXTS.map(CODEC.encode), ANY_TOKENS, BYTES)
STOPS = st.lists(
    st.sampled_from(["ab", "aab", "abc", "b", "🙂", "\n\n", "the end", "end. ", "\ufffd", "界 ", "aaaa"]),
    max_size=3,
    unique=True,
)


def first_cut(text: str, stops: Sequence[str]) -> int | None:
    """Return where the stop string that is complete first begins: the rule, character by character."""
    for end in range(len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return min(starts)
    return None


def pushed_in_pieces(stream: TextStream, tokens: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Push tokens in pieces of these sizes, and the rest one by one; return the texts."""
    texts, place = [], 0
    for size in [*sizes, *[1] * len(tokens)]:
        texts.append(stream.push(tokens[place : place + size]))
        place += size
    return [*texts, stream.finish()]


@given(TOKENS, STOPS, st.lists(st.integers(0, 70), max_size=20))
def test_the_pieces_are_the_text_cut_at_the_first_stop_string(
    tokens: list[int], stops: list[str], sizes: list[int]
) -> None:
    whole = CODEC.decode(tokens)
    stream = TextStream(CODEC.decode, stops)
    text = "".join(pushed_in_pieces(stream, tokens, sizes))
    assert text == whole[: first_cut(whole, stops)]
    one_by_one = TextStream(CODEC.decode, stops)
    pushed_in_pieces(one_by_one, tokens, [])
    assert stream.end == one_by_one.end


@given(TOKENS, STOPS, ANY_TOKENS, st.lists(st.integers(0, 70), max_size=20))
def test_an_end_token_ends_the_text_before_it(
    tokens: list[int], stops: list[str], after: list[int], sizes: list[int]
) -> None:
    whole = CODEC.decode(tokens)
    stream = TextStream(CODEC.decode, stops, {END})
    assert "".join(pushed_in_pieces(stream, [*tokens, END, *after], sizes)) == whole[: first_cut(whole, stops)]
    if first_cut(whole, stops) is None:
        assert stream.end == SampleEnd(len(tokens) + 1, "stop")


@given(TEXTS, st.lists(st.integers(0, 70), max_size=20))
def test_no_half_of_a_character_is_sent(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "")
    texts = pushed_in_pieces(TextStream(CODEC.decode), CODEC.encode(text), sizes)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


@given(TOKENS)
def test_the_texts_of_tokens_are_the_text(tokens: list[int]) -> None:
    texts = token_texts(CODEC.decode, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == CODEC.decode(tokens)


@given(st.lists(st.sampled_from(["the", "end", "of", "Hello", "🙂🙃👨‍👩‍👧", "你好", "é"]), max_size=60).map(" ".join))
def test_single_bytes_of_other_vocabularies_are_held_back_until_they_are_a_character(text: str) -> None:
    codec = pieces()
    tokens = as_pieces(text)
    assert codec.decode(tokens) == text
    assert "".join(pushed_in_pieces(TextStream(codec.decode), tokens, [])) == text


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    tokens = [token for char in "one STOP two" for token in CODEC.encode(char)]
    for size in (1, 3, 100):
        stream = TextStream(CODEC.decode, ["STOP"])
        texts = [stream.push(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        assert "".join(texts) == "one "
        assert stream.end == SampleEnd(len("one STOP"), "stop")
        assert stream.push(CODEC.encode("more")) == stream.finish() == ""


def test_a_sample_that_ends_with_the_begin_of_a_stop_string_keeps_it() -> None:
    stream = TextStream(CODEC.decode, ["the end"])
    assert stream.push(CODEC.encode("It is the en")) == "It is "
    assert stream.finish() == "the en"
    assert stream.end == SampleEnd(len(CODEC.encode("It is the en")), "length")


@pytest.mark.parametrize("token", [WORDLESS, CODEC.encode("é")[0], CODEC.encode("🙂")[0]])
def test_a_sample_without_a_readable_character_costs_time_in_proportion_to_its_length(token: int) -> None:
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return CODEC.decode(tokens)

    costs = []
    for count in (2_000, 4_000):
        decoded = 0
        window = DecodeWindow(decode)
        texts = [window.push([token]) for _ in range(count)]
        assert len(texts[-1]) <= 1
        assert "".join(texts) + window.flush() == CODEC.decode([token] * count)
        costs.append(decoded / count)
    assert costs[1] < 1.2 * costs[0] < 1_000
