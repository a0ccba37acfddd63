"""The chunk exchange: any split of the bytes means the same, and no bytes cost more than the frame they announce."""

import re
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import ERRORS, PeerFault
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire import exchange
from protocol.wire.exchange import (
    REQUESTER,
    RESPONDER,
    TRANSITIONS,
    ChunkStanding,
    Requester,
    Responder,
    Speech,
    SpokeAfterBye,
    TooMuchNews,
    UnaskedAnswer,
    WantRefused,
    WrongRole,
)
from protocol.wire.frames import (
    Bye,
    Cancel,
    Chunk,
    Farewell,
    FrameReader,
    FrameTooLarge,
    Have,
    MalformedFrame,
    Message,
    Reason,
    Reject,
    Want,
    encode,
)

A, B = chunk_id(b"a"), chunk_id(b"b")
HEADER_BYTES = 5

names = st.binary(min_size=32, max_size=32).map(lambda raw: ChunkId(raw.hex()))
messages = st.one_of(
    st.builds(Have, st.lists(names, min_size=1, max_size=limits.EXCHANGE_HAVE_NAMES_MAX).map(tuple)),
    st.builds(Want, names, st.booleans()),
    st.builds(Cancel, names),
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


def test_a_chunk_is_known_from_the_last_byte_of_its_name_to_the_last_of_its_own() -> None:
    chunk = chunk_id(b"bytes")
    reader, frame = FrameReader(), encode(Chunk(chunk, b"bytes"))
    known, missing = [], []
    for at in range(len(frame)):
        reader.feed(frame[at : at + 1])
        known.append(reader.arriving)
        missing.append(reader.missing_bytes)
    name_end = HEADER_BYTES + 32
    assert missing == [1] * (HEADER_BYTES - 1) + [*range(len(frame) - HEADER_BYTES, 0, -1)] + [1]
    assert known == [None] * (name_end - 1) + [chunk] * (len(frame) - name_end) + [None]
    reader.feed(encode(Want(chunk))[:-1])
    assert reader.arriving is None


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
        (frame(1, 31), MalformedFrame),  # a HAVE without a name
        (frame(1, 33, bytes(33)), MalformedFrame),  # one and a bit
        (frame(1, 32 * limits.EXCHANGE_HAVE_NAMES_MAX + 1), FrameTooLarge),
        (frame(5, 31), MalformedFrame),
        (frame(5, 33), FrameTooLarge),
        (frame(7, 1), MalformedFrame),
        (frame(255, 0), MalformedFrame),
        (frame(2, 0), MalformedFrame),  # a WANT without a name
        (frame(2, 32), MalformedFrame),  # one that does not say whether its sender is behind
        (frame(2, 33, bytes(32) + b"\x02"), MalformedFrame),  # neither in step nor behind
        (frame(2, 34), FrameTooLarge),
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
    [Chunk(B, b"b"), Reject(B, Reason.BUSY), Chunk(A, b"aa")],
    ids=["unasked chunk", "unasked reject", "another size"],
)
def test_an_answer_nobody_asked_for_is_the_peers_fault(message: Message) -> None:
    requester = Requester()
    requester.want(A, 1)
    with pytest.raises(UnaskedAnswer):
        requester.receive(message)


SAID = [Have((A,)), Want(A), Cancel(A), Chunk(A, b"a"), Reject(A, Reason.BUSY), Bye(Farewell.DONE)]


def hearing(message: Message, *, by_responder: bool, after_bye: bool) -> None:
    """One side hears this while A is asked for, or after the other has left."""
    requester, responder = Requester(), Responder()
    side = responder if by_responder else requester
    responder.receive(requester.want(A, 1))
    if by_responder and isinstance(message, Want):
        responder.reject(A, Reason.BUSY)
    if after_bye:
        side.receive(Bye(Farewell.DONE))
    side.receive(message)


@pytest.mark.parametrize("message", SAID, ids=repr)
@pytest.mark.parametrize(("by_responder", "table"), [(False, RESPONDER), (True, REQUESTER)], ids=["answers", "asks"])
def test_who_speaks_out_of_role_is_at_fault(message: Message, by_responder: bool, table: dict[Any, Speech]) -> None:
    if (Speech.OPEN, type(message)) in table:
        hearing(message, by_responder=by_responder, after_bye=False)
    else:
        with pytest.raises(WrongRole, match=f"must not send {type(message).__name__.upper()}"):
            hearing(message, by_responder=by_responder, after_bye=False)


@pytest.mark.parametrize("message", SAID, ids=repr)
@pytest.mark.parametrize("by_responder", [False, True], ids=["answers", "asks"])
def test_nothing_comes_after_bye(message: Message, by_responder: bool) -> None:
    with pytest.raises(SpokeAfterBye, match=f"{type(message).__name__.upper()} came after BYE"):
        hearing(message, by_responder=by_responder, after_bye=True)


def test_the_speeches_in_the_specification_are_the_tables() -> None:
    said = re.findall(
        r"^    (responder|requester) +(open|ended) +([A-Z]+) +→ (\w+)", exchange.__doc__ or "", re.MULTILINE
    )
    assert said == [
        (who, before.value, kind.__name__.upper(), after.value)
        for who, table in (("responder", RESPONDER), ("requester", REQUESTER))
        for (before, kind), after in table.items()
    ]


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


def test_a_responder_owes_in_order_and_a_name_may_be_asked_again_once_answered() -> None:
    responder = Responder()
    responder.receive(Want(A))
    responder.receive(Want(B))
    assert list(responder.owed) == [A, B]
    assert responder.chunk(A, b"a") == Chunk(A, b"a")
    responder.receive(Want(A))
    assert list(responder.owed) == [B, A]
    responder.receive(Bye(Farewell.DONE))
    assert responder.ended


def test_a_want_taken_back_in_time_is_rejected_as_cancelled_and_may_be_asked_again() -> None:
    requester, responder = Requester(), Responder()
    responder.receive(requester.want(A, 1))
    cancel = requester.cancel(A)
    assert cancel == Cancel(A)
    assert requester.cancel(A) is None  # once is enough
    answer = responder.receive(cancel)
    assert answer == Reject(A, Reason.CANCELLED)
    assert list(responder.owed) == []
    assert requester.receive(answer) == answer
    assert requester.cancel(A) is None
    responder.receive(requester.want(A, 1))


def test_cancelled_is_no_answer_to_a_want_that_nobody_took_back() -> None:
    requester = Requester()
    requester.want(A, 3)
    with pytest.raises(UnaskedAnswer, match="was not cancelled"):
        requester.receive(Reject(A, Reason.CANCELLED))


def test_a_chunk_that_crosses_its_cancel_is_the_answer() -> None:
    requester, responder = Requester(), Responder()
    responder.receive(requester.want(A, 1))
    cancel = requester.cancel(A)
    assert cancel is not None
    chunk = responder.chunk(A, b"a")
    assert responder.receive(cancel) is None
    assert requester.receive(chunk) == chunk
    assert requester.unanswered == 0


def test_a_chunk_under_way_cannot_be_cancelled() -> None:
    requester, responder = Requester(), Responder()
    responder.receive(requester.want(A, 1))
    responder.start_answer(A)
    cancel = requester.cancel(A)
    assert cancel is not None
    assert responder.receive(cancel) is None
    assert requester.receive(responder.chunk(A, b"a")) == Chunk(A, b"a")


@pytest.mark.parametrize("answered", [0, 1, 3])
def test_a_flood_of_cancels_that_no_want_went_before_ends(answered: int) -> None:
    """Each costs the responder as much as a WANT, and no answer holds it back."""
    responder = Responder()
    for number in range(answered):
        responder.receive(Want(chunk_id(bytes([number]))))
        responder.reject(chunk_id(bytes([number])), Reason.BUSY)
    for _ in range(answered):
        assert responder.receive(Cancel(A)) is None, "it may have crossed an answer"
    with pytest.raises(WantRefused, match="without a WANT"):
        responder.receive(Cancel(A))


@pytest.mark.parametrize("standing", ChunkStanding)
@pytest.mark.parametrize("message", [Want(A), Cancel(A), Chunk(A, b"a"), Reject(A, Reason.BUSY)], ids=repr)
def test_what_the_table_does_not_list_is_refused_on_both_sides(standing: ChunkStanding, message: Message) -> None:
    requester, responder = Requester(), Responder()
    responder.receive(requester.want(A, 1))
    responder.start_answer(A)
    if standing is ChunkStanding.CLOSED:
        requester.receive(responder.chunk(A, b"a"))
    if standing is ChunkStanding.CANCELLED and (cancel := requester.cancel(A)):
        responder.receive(cancel)
    listed = (standing, type(message)) in TRANSITIONS
    receiver = responder if isinstance(message, Want | Cancel) else requester
    if listed:
        receiver.receive(message)
    else:
        with pytest.raises(PeerFault):
            receiver.receive(message)


def test_the_table_in_the_specification_is_the_table() -> None:
    said = re.findall(r"^    (closed|open|cancelled) +([A-Z]+) +→ (\w+)", exchange.__doc__ or "", re.MULTILINE)
    assert said == [(before.value, kind.__name__.upper(), after.value) for (before, kind), after in TRANSITIONS.items()]


wants_and_cancels = st.lists(st.tuples(st.sampled_from(["want", "cancel", "chunk", "reject"]), st.sampled_from([A, B])))


@given(wants_and_cancels)
def test_two_honest_sides_never_fault_each_other_and_every_want_is_answered_once(
    steps: list[tuple[str, ChunkId]],
) -> None:
    requester, responder = Requester(), Responder()
    to_requester: list[Message] = []
    wanted = answered = 0
    for step, chunk in steps:
        if step == "want":
            with suppress(ValueError):
                responder.receive(requester.want(chunk, 1))
                wanted += 1
        elif step == "cancel":
            if (cancel := requester.cancel(chunk)) and (reject := responder.receive(cancel)):
                to_requester.append(reject)
        elif chunk in responder.owed:
            to_requester.append(
                responder.chunk(chunk, b"x") if step == "chunk" else responder.reject(chunk, Reason.BUSY)
            )
        if len(to_requester) > 2:  # answers travel behind
            requester.receive(to_requester.pop(0))
            answered += 1
    for message in to_requester:
        requester.receive(message)
        answered += 1
    assert wanted - answered == requester.unanswered == len(responder.owed)


def test_a_responder_that_tells_of_chunks_without_end_is_refused() -> None:
    requester, full = Requester(), Have((A,) * limits.EXCHANGE_HAVE_NAMES_MAX)
    for _ in range(limits.EXCHANGE_HAVE_TOTAL_MAX // len(full.chunks)):
        requester.receive(full)
    with pytest.raises(TooMuchNews):
        requester.receive(full)


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
    faults = (MalformedFrame, FrameTooLarge, UnaskedAnswer, WantRefused, WrongRole, SpokeAfterBye, TooMuchNews)
    codes = {fault.code for fault in faults}
    assert len(codes) == len(faults)
    assert not codes & set(ERRORS)


def test_what_came_before_a_bad_frame_counts_and_the_fault_is_told_next() -> None:
    reader = FrameReader()
    assert reader.feed(encode(Chunk(A, b"lie")) + encode(Want(B)) + b"\xff" * HEADER_BYTES) == [
        Chunk(A, b"lie"),
        Want(B),
    ]
    assert isinstance(reader.fault, MalformedFrame)
    with pytest.raises(MalformedFrame):
        reader.feed(b"")
