"""Samples that are sent while they grow: the same text as in one piece, whoever reports which tokens how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.endpoint.sample_stream import SampleStream
from protocol.errors import AnswerChanged
from tests.coordinator.endpoint.vocabularies import END, byte_pairs, token_texts

CODEC = byte_pairs()

STOPS = st.sampled_from([(), ("STOP",)])
PUSHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)
TEXTS = st.lists(st.sampled_from(["the end ", "STOP", "🙂🙃", "你好", "é", "x"]), max_size=12).map("".join)


def stream_of(*stops: str, with_texts: bool = False) -> SampleStream:
    return SampleStream(CODEC.decode, stops, {END}, with_texts=with_texts)


def logprobs_of(tokens: list[int]) -> list[float]:
    return [-0.5 * place for place in range(len(tokens))]


@given(
    TEXTS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12), st.sampled_from([(), ("STOP",)])
)
def test_parts_are_together_the_whole_sample(text: str, pushes: list[tuple[int, int]], stops: tuple[str, ...]) -> None:
    """Pushes come in any order, twice, with holes before them, or not at all."""
    tokens = [*CODEC.encode(text), END]
    logprobs = logprobs_of(tokens)
    whole = stream_of(*stops, with_texts=True).finish(tokens, logprobs, "r")
    stream, parts = stream_of(*stops, with_texts=True), []
    for start, count in pushes:
        part = stream.push(start, tokens[start : start + count], logprobs[start : start + count])
        parts += [part] if part else []
    assert all(part.finish is None and not part.receipt for part in parts)
    parts.append(last := stream.finish(tokens, logprobs, "r"))
    assert (last.finish, last.receipt) == (whole.finish, "r")
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [value for part in parts for value in part.logprobs] == whole.logprobs
    assert "".join(text for part in parts for text in part.token_texts) == CODEC.decode(whole.tokens)
    assert stream.sent_tokens == len(whole.tokens)
    at = 0
    for part in parts:
        assert part.offset_chars == at
        at += sum(map(len, part.token_texts))


def test_the_texts_of_tokens_are_those_of_the_whole_sample() -> None:
    tokens = [*CODEC.encode("naïve 🙂 café"), END]
    part = stream_of(with_texts=True).finish(tokens, logprobs_of(tokens), "r")
    assert list(part.token_texts) == token_texts(CODEC.decode, tokens)


def test_tokens_after_a_stop_string_are_in_no_part() -> None:
    tokens, stream = CODEC.encode("one STOP two"), stream_of("STOP")
    first = stream.push(0, tokens, logprobs_of(tokens))
    assert first is not None
    assert (first.text, first.finish) == ("one ", None)
    assert CODEC.decode(first.tokens) == "one STOP"
    assert stream.push(len(tokens), [END], [-1.0]) is None
    last = stream.finish([*tokens, END], logprobs_of([*tokens, END]), "r")
    assert (last.text, last.tokens, last.finish) == ("", [], "stop")


def test_a_node_that_begins_anew_with_the_same_tokens_changes_nothing() -> None:
    tokens, stream = CODEC.encode("naïve café, 1234567"), stream_of()
    stream.push(0, tokens[:3], logprobs_of(tokens[:3]))
    assert stream.push(0, tokens[:2], logprobs_of(tokens[:2])) is None
    part = stream.push(0, tokens[:5], logprobs_of(tokens[:5]))
    assert part is not None
    assert (part.tokens, part.logprobs) == (tokens[3:5], [-1.5, -2.0])


@pytest.mark.parametrize("is_seen_before_the_end", [True, False])
def test_an_answer_other_than_what_was_sent_is_an_error(is_seen_before_the_end: bool) -> None:
    tokens, stream = CODEC.encode("naïve café, 1234567"), stream_of()
    stream.push(0, tokens[:3], logprobs_of(tokens[:3]))
    other = [tokens[0], tokens[1] + 1, *tokens[2:]]
    if is_seen_before_the_end:
        assert stream.push(1, other[1:4], [-1.0] * 3) is None
        assert stream.push(3, tokens[3:], logprobs_of(tokens[3:])) is None
    with pytest.raises(AnswerChanged):
        stream.finish(other, logprobs_of(other), "r")
