"""The chunk exchange: any split of the bytes means the same, and no bytes cost more than the frame they announce."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.chunks import chunk_id
from protocol.errors import ERRORS, PeerFault
from protocol.exchange import (
    Bye,
    Chunk,
    Farewell,
    FrameReader,
    FrameTooLarge,
    MalformedFrame,
    Message,
    Reason,
    Reject,
    Requester,
    Responder,
    UnaskedAnswer,
    Want,
    WantRefused,
    encode,
)
from protocol.ids import ChunkId

A, B = chunk_id(b"a"), chunk_id(b"b")
HEADER_BYTES = 5

names = st.binary(min_size=32, max_size=32).map(lambda raw: ChunkId(raw.hex()))
messages = st.one_of(
    st.builds(Want, names),
    st.builds(Chunk, names, st.binary(min_size=1, max_size=300)),
    st.builds(Reject, names, st.sampled_from(Reason)),
    st.builds(Bye, st.sampled_from(Farewell)),
)


def frame(kind: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack(">BI", kind, length) + body


@given(st.lists(messages, max_size=8), st.lists(st.integers(min_value=1, max_value=400), max_size=40))
def test_any_split_of_the_bytes_gives_the_same_messages(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in sent)
    reader = FrameReader()
    got: list[Message] = []
    for cut in cuts:
        got += reader.feed(data[:cut])
        data = data[cut:]
    got += reader.feed(data)
    assert got == sent
    assert reader.buffered_bytes == 0


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_garbage_is_a_named_fault_and_never_buffers_more_than_the_cap(pieces: list[bytes]) -> None:
    reader = FrameReader(chunk_max_bytes=64)
    try:
        for piece in pieces:
            reader.feed(piece)
            assert reader.buffered_bytes <= HEADER_BYTES + 32 + 64
    except PeerFault:
        assert reader.buffered_bytes <= HEADER_BYTES + 32 + 64


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (frame(0, 32), MalformedFrame),  # no such type
        (frame(1, 32), MalformedFrame),  # HAVE is not spoken yet
        (frame(255, 0), MalformedFrame),
        (frame(2, 0), MalformedFrame),  # a WANT without a name
        (frame(2, 31), MalformedFrame),
        (frame(2, 33), FrameTooLarge),
        (frame(3, 32), MalformedFrame),  # a CHUNK without bytes
        (frame(3, 32 + limits.CHUNK_MAX_BYTES + 1), FrameTooLarge),
        (frame(3, 2**32 - 1), FrameTooLarge),
        (frame(4, 33, bytes(32) + b"\x00"), MalformedFrame),  # no such reason
        (frame(6, 0), MalformedFrame),
        (frame(6, 1, b"\x09"), MalformedFrame),
    ],
)
def test_each_bad_frame_has_a_name(data: bytes, fault: type[PeerFault]) -> None:
    with pytest.raises(fault):
        FrameReader().feed(data)


def test_an_endless_chunk_is_refused_at_its_header() -> None:
    reader = FrameReader(chunk_max_bytes=1024)
    with pytest.raises(FrameTooLarge):
        reader.feed(frame(3, 32 + 1025) + bytes(500_000))
    assert reader.buffered_bytes == HEADER_BYTES


@pytest.mark.parametrize("size_bytes", [1, limits.CHUNK_MAX_BYTES - 1, limits.CHUNK_MAX_BYTES])
def test_a_chunk_of_any_allowed_size_survives_the_wire(size_bytes: int) -> None:
    data = bytes(size_bytes)
    assert FrameReader().feed(encode(Chunk(A, data))) == [Chunk(A, data)]


@pytest.mark.parametrize("size_bytes", [0, limits.CHUNK_MAX_BYTES + 1])
def test_a_chunk_of_no_allowed_size_is_never_sent(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot have a body"):
        encode(Chunk(A, bytes(size_bytes)))


def test_a_responder_reads_no_chunks_at_all() -> None:
    with pytest.raises(FrameTooLarge):
        FrameReader(chunk_max_bytes=0).feed(encode(Chunk(A, b"x")))


def test_every_want_is_answered_once_in_any_order() -> None:
    requester = Requester()
    assert requester.want(A, 1) == Want(A)
    requester.want(B, 1)
    assert requester.receive(Reject(B, Reason.ABSENT)) == Reject(B, Reason.ABSENT)
    assert requester.receive(Chunk(A, b"a")) == Chunk(A, b"a")
    assert requester.unanswered == 0


@pytest.mark.parametrize(
    "message",
    [Chunk(B, b"b"), Reject(B, Reason.BUSY), Chunk(A, b"aa"), Want(A)],
    ids=["unasked chunk", "unasked reject", "another size", "a question"],
)
def test_an_answer_nobody_asked_for_is_the_peers_fault(message: Message) -> None:
    requester = Requester()
    requester.want(A, 1)
    with pytest.raises(UnaskedAnswer):
        requester.receive(message)


def test_a_second_answer_is_the_peers_fault() -> None:
    requester = Requester()
    requester.want(A, 1)
    requester.receive(Chunk(A, b"a"))
    with pytest.raises(UnaskedAnswer):
        requester.receive(Chunk(A, b"a"))


def test_asking_twice_or_too_much_is_our_own_bug() -> None:
    requester = Requester()
    requester.want(A, 1)
    with pytest.raises(ValueError, match="already asked"):
        requester.want(A, 1)
    for number in range(limits.EXCHANGE_WANTS_MAX - 1):
        requester.want(chunk_id(bytes([number])), 1)
    with pytest.raises(ValueError, match="window is full"):
        requester.want(B, 1)


def test_a_responder_answers_in_order_until_the_goodbye() -> None:
    responder = Responder()
    responder.receive(Want(A))
    responder.receive(Want(B))
    assert responder.next() == A
    responder.receive(Want(A))  # answered, so it may be asked again
    responder.receive(Bye(Farewell.DONE))
    assert responder.ended
    assert responder.next() is None


def test_a_flood_of_wants_is_refused() -> None:
    responder = Responder()
    for number in range(limits.EXCHANGE_WANTS_MAX):
        responder.receive(Want(chunk_id(bytes([number]))))
    with pytest.raises(WantRefused):
        responder.receive(Want(chunk_id(b"one too many")))


@pytest.mark.parametrize("message", [Want(A), Chunk(A, b"a"), Reject(A, Reason.BUSY)])
def test_a_requester_that_repeats_itself_or_answers_is_refused(message: Message) -> None:
    responder = Responder()
    responder.receive(Want(A))
    with pytest.raises(PeerFault):
        responder.receive(message)


def test_the_faults_have_codes_of_their_own() -> None:
    codes = {fault.code for fault in (MalformedFrame, FrameTooLarge, UnaskedAnswer, WantRefused)}
    assert len(codes) == 4
    assert not codes & set(ERRORS)
