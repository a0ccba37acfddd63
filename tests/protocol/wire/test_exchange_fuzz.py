"""The chunk exchange under hostile bytes: both sides answer with a fault by name, and keep no more than they may.

- The bytes look like an exchange: known types, lengths at the edges of what each may have, sound messages and damaged
  ones. So most get past the header, and what was reached is counted: a fuzzer that reaches nothing fails.
- What a peer sends comes in any pieces.
"""

import struct
from collections import Counter
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.exchange import Requester, Responder
from protocol.wire.frames import Bye, Cancel, Chunk, Farewell, FrameReader, Have, Reason, Reject, Want, encode

CAP_BYTES = 64
"""The largest chunk that the requester expects."""
HEADER_BYTES, NAME_BYTES = 5, 32
HAVE_BYTES = NAME_BYTES * limits.EXCHANGE_HAVE_NAMES_MAX

POOL = [chunk_id(bytes([number])) for number in range(limits.EXCHANGE_WANTS_MAX + 4)]
"""So few names that the same ones come again, and more than may be wanted at once."""
NAMES = st.sampled_from(POOL)

MESSAGES = st.one_of(
    st.builds(Have, st.lists(NAMES, min_size=1, max_size=limits.EXCHANGE_HAVE_NAMES_MAX).map(tuple)),
    st.builds(Want, NAMES),
    st.builds(Cancel, NAMES),
    st.builds(Chunk, NAMES, st.binary(min_size=1, max_size=CAP_BYTES + 1)),
    st.builds(Reject, NAMES, st.sampled_from(Reason)),
    st.builds(Bye, st.sampled_from(Farewell)),
)
QUESTIONS = NAMES.map(lambda name: encode(Want(name))) | NAMES.map(
    lambda name: encode(Want(name)) + encode(Cancel(name))
)
DEEDS = st.lists(st.sampled_from(["wait", "take", "chunk", "reject"]), min_size=1, max_size=8)
"""A responder's deeds after each message, in turns."""

LENGTHS = st.sampled_from(
    [
        *(0, 1, NAME_BYTES - 1, NAME_BYTES, NAME_BYTES + 1, NAME_BYTES + CAP_BYTES, NAME_BYTES + CAP_BYTES + 1),
        *(HAVE_BYTES - 1, HAVE_BYTES, HAVE_BYTES + 1, NAME_BYTES + limits.CHUNK_MAX_BYTES + 1, 2**32 - 1),
    ]
)


@st.composite
def raw_frames(draw: st.DrawFn) -> bytes:
    """Any type with any length, and a body that is as long as it was said, or not."""
    kind, length = draw(st.integers(0, 8)), draw(LENGTHS)
    name = bytes.fromhex(draw(NAMES))
    kept = min(length, HAVE_BYTES + 1)
    body = (name + draw(st.binary(min_size=1, max_size=4)) * kept)[:kept]
    return struct.pack(">BI", kind, length) + draw(st.just(body) | st.just(body[:-1]) | st.just(body + b"!"))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sound message, of which some bytes became others."""
    frame = encode(draw(MESSAGES))
    at = draw(st.integers(0, len(frame)))
    return frame[:at] + draw(st.binary(max_size=4)) + frame[at + draw(st.integers(0, 4)) :]


def wire(likely: st.SearchStrategy[bytes], others: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Draw what a peer sends that is sound for a while, then is not, in any pieces."""
    hostile = raw_frames() | damaged() | st.binary(max_size=40)
    sent = st.tuples(st.lists(likely, max_size=30), st.lists(others | hostile, max_size=6))
    cuts = st.lists(st.integers(1, 400), max_size=12)
    return st.tuples(sent, cuts).map(lambda drawn: pieces(b"".join(drawn[0][0] + drawn[0][1]), drawn[1]))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    found = []
    for cut in cuts:
        found.append(data[:cut])
        data = data[cut:]
    return [*found, data]


def test_whatever_a_requester_sends_the_responder_owes_no_more_than_a_window() -> None:
    met: Counter[str] = Counter()

    @settings(max_examples=1_600)  # with 400, one run in ten met no frame that is too large
    @given(wire(QUESTIONS, MESSAGES.map(encode)), DEEDS)
    def hear(sent: list[bytes], deeds: list[str]) -> None:
        reader, responder = FrameReader(chunk_max_bytes=0), Responder()
        turns = cycle(deeds)
        met["peers"] += 1
        heard = 0
        try:
            for piece in [*sent, b""]:  # the last call raises what is wrong behind the messages before it
                messages = reader.feed(piece)
                assert reader.buffered_bytes <= HEADER_BYTES + HAVE_BYTES
                for message in messages:
                    heard += 1
                    met[type(message).__name__] += 1
                    rejected = responder.receive(message)
                    met["taken back"] += rejected is not None
                    assert len(responder.owed) <= len(responder._names) <= limits.EXCHANGE_WANTS_MAX
                    if responder.owed:
                        answer(responder, next(turns))
        except PeerFault as fault:
            met[type(fault).__name__] += 1
            assert reader.buffered_bytes <= HEADER_BYTES + HAVE_BYTES
        met["peers with a message"] += heard > 0

    def answer(responder: Responder, how: str) -> None:
        chunk = next(iter(responder.owed))
        met[how] += 1
        if how == "take":
            responder.start_answer(chunk)
        elif how == "chunk":
            responder.chunk(chunk, b"x")
        elif how == "reject":
            responder.reject(chunk, Reason.ABSENT)

    hear()
    assert met["peers with a message"] > met["peers"] / 2, met
    for kind in ("Want", "Cancel", "Have", "Reject", "Bye", "taken back", "take", "chunk", "reject"):
        assert met[kind], f"no peer came as far as {kind}: {met}"
    for fault in ("MalformedFrame", "FrameTooLarge", "WrongRole", "SpokeAfterBye", "WantRefused"):
        assert met[fault], f"no peer was refused as {fault}: {met}"


def test_whatever_a_responder_sends_the_requester_keeps_one_frame_and_knows_what_it_asked() -> None:
    met: Counter[str] = Counter()
    answers = (
        st.builds(Chunk, NAMES, st.binary(min_size=1, max_size=2))
        | st.builds(Reject, NAMES, st.sampled_from([Reason.ABSENT, Reason.BUSY]))
        | st.builds(Have, st.lists(NAMES, min_size=1, max_size=8).map(tuple))
    )

    @settings(max_examples=1_600)  # with 400, one run in ten met no frame that is too large
    @given(wire(answers.map(encode), MESSAGES.map(encode)), st.sets(NAMES), st.booleans())
    def hear(sent: list[bytes], taken_back: set[ChunkId], again: bool) -> None:
        reader, requester = FrameReader(chunk_max_bytes=CAP_BYTES), Requester()
        for name in POOL[: limits.EXCHANGE_WANTS_MAX]:
            requester.want(name, 1)
            if name in taken_back:
                requester.cancel(name)
        met["peers"] += 1
        heard = 0
        try:
            for piece in [*sent, b""]:  # the last call raises what is wrong behind the messages before it
                messages = reader.feed(piece)
                assert reader.buffered_bytes <= HEADER_BYTES + max(HAVE_BYTES, NAME_BYTES + CAP_BYTES)
                for message in messages:
                    before = requester.unanswered
                    told = requester.receive(message)
                    heard += 1
                    met[type(told).__name__] += 1
                    assert requester.unanswered == before - isinstance(told, Chunk | Reject)
                    assert not isinstance(told, Chunk) or len(told.data) == 1
                    if again and isinstance(told, Chunk | Reject):
                        requester.want(told.chunk, 1)
        except PeerFault as fault:
            met[type(fault).__name__] += 1
        assert requester.unanswered == len(requester._sizes) <= limits.EXCHANGE_WANTS_MAX
        met["peers with a message"] += heard > 0

    hear()
    assert met["peers with a message"] > met["peers"] / 2, met
    for kind in ("Chunk", "Reject", "Have", "Bye"):
        assert met[kind], f"no peer came as far as {kind}: {met}"
    for fault in ("MalformedFrame", "FrameTooLarge", "WrongRole", "SpokeAfterBye", "UnaskedAnswer"):
        assert met[fault], f"no peer was refused as {fault}: {met}"
