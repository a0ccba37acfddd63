"""Chunks: the name is the hash, and any other bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ChunkMismatch
from protocol.ids import ChunkId
from protocol.limits import KIB, MIB
from protocol.policy.chunks import blob_path, chunk_id, digest, fitting_size, split, verify

C = 8


@pytest.mark.parametrize(
    ("size_bytes", "chunks"),
    [(0, 0), (1, 1), (C - 1, 1), (C, 1), (C + 1, 2), (2 * C, 2), (10 * C + 3, 11)],
)
def test_a_file_of_any_size_is_cut_without_loss(size_bytes: int, chunks: int) -> None:
    data = bytes(number % 251 for number in range(size_bytes))
    pieces = list(split(data, C))
    assert len(pieces) == chunks
    assert b"".join(pieces) == data
    assert all(len(piece) == C for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("total_bytes", "size_bytes"),
    [(0, 64 * KIB), (32 * MIB, 64 * KIB), (32 * MIB + 1, 80 * KIB), (64 * MIB, 128 * KIB), (10**12, 4 * MIB)],
)
def test_a_version_has_a_few_hundred_chunks_while_its_size_allows(total_bytes: int, size_bytes: int) -> None:
    assert fitting_size(total_bytes) == size_bytes


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_flipped_bit_is_noticed(data: bytes, draw: st.DataObject) -> None:
    name = chunk_id(data)
    verify(name, data)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChunkMismatch):
        verify(name, bytes(damaged))


@pytest.mark.parametrize("name", ["", "0" * 64, "A" * 64, chunk_id(b"x").upper(), chunk_id(b"x")[:-1]])
def test_another_name_is_another_chunk(name: str) -> None:
    with pytest.raises(ChunkMismatch):
        verify(ChunkId(name), b"x")


def test_the_hash_is_blake3() -> None:
    assert digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_chunk_lies_where_its_name_says() -> None:
    name = chunk_id(b"x")
    assert blob_path(name).parts == (name[:2], name)
