"""The origin: it delivers what no peer can, and one request of it that fails says nothing of the others."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from protocol.errors import UnknownChunk, Unreachable
from protocol.ids import ChunkId
from protocol.policy import chunks
from protocol.policy.chunks import chunk_id
from swarm_node.p2p.download import NoSource, Origin
from tests.swarm_node.p2p_world import (
    QUICK,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    make_version,
    node,
    plan_of,
    store,
)

pytestmark = pytest.mark.trio

VERSION = make_version()
HASTY = replace(QUICK, picker=replace(QUICK.picker, give_up_s=1.0))


async def test_the_origin_delivers_what_no_peer_can(tmp_path: Path) -> None:
    async def origin(chunk: ChunkId) -> bytes:
        return VERSION.chunks[chunk]

    blobs = store(tmp_path / "me")
    half = dict(list(VERSION.chunks.items())[::2])
    async with node(1, honest(store(tmp_path / "seeder", half))) as seeder, node(3) as me:
        report = await fetch(VERSION, plan_of(as_seeder(seeder)), me, blobs, origin=origin)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.bytes_from["seeder"] > 0
    assert report.bytes_from["origin"] >= sum(map(len, VERSION.chunks.values())) - sum(map(len, half.values()))


async def test_what_the_origin_is_bringing_is_not_asked_for_again_when_another_chunk_fails(tmp_path: Path) -> None:
    version = make_version(chunk_count=2)
    first, second = version.chunks
    asked, goes_on = Counter[ChunkId](), trio.Event()

    async def origin(chunk: ChunkId) -> bytes:
        asked[chunk] += 1
        if chunk == second:
            await goes_on.wait()
        elif asked[first] == 1:
            raise UnknownChunk("It is not there yet.")
        goes_on.set()
        return version.chunks[chunk]

    blobs = store(tmp_path)
    async with node(3) as me:
        report = await fetch(version, plan_of(), me, blobs, origin=origin)
    assert holds_exactly(blobs, version.chunks)
    assert asked == {first: 2, second: 1}
    assert report.bytes_twice == 0


async def test_an_origin_that_sends_one_wrong_page_is_not_given_up(tmp_path: Path) -> None:
    pages = [b"<html>"]

    async def origin(chunk: ChunkId) -> bytes:
        return pages.pop() if pages else VERSION.chunks[chunk]

    blobs = store(tmp_path)
    async with node(3) as me:
        report = await fetch(VERSION, plan_of(), me, blobs, origin=origin)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.blames == []


WRONG = {chunk: data[:-1] + b"?" for chunk, data in VERSION.chunks.items()}


async def lying(chunk: ChunkId) -> bytes:
    return WRONG[chunk]


async def lying_behind_a_check(chunk: ChunkId) -> bytes:
    chunks.verify(chunk, WRONG[chunk])
    return WRONG[chunk]


@pytest.mark.parametrize("origin", [lying, lying_behind_a_check])
async def test_an_origin_that_lies_is_given_up_with_the_names_of_what_it_sent(tmp_path: Path, origin: Origin) -> None:
    blobs = store(tmp_path)
    async with node(3) as me:
        with pytest.raises(NoSource) as given_up:
            await fetch(VERSION, plan_of(), me, blobs, origin=origin, rules=HASTY)
    told = re.findall(r"Chunk (\w+)… was expected, but chunk (\w+)… arrived", str(given_up.value))
    assert told
    assert set(told) <= {(chunk[:12], chunk_id(data)[:12]) for chunk, data in WRONG.items()}
    assert holds_exactly(blobs, {})


async def test_an_origin_that_is_down_is_given_up_with_the_reason(tmp_path: Path) -> None:
    async def down(chunk: ChunkId) -> bytes:
        raise Unreachable("The coordinator did not answer.")

    async with node(3) as me:
        with pytest.raises(NoSource, match=r"did not answer\. \[unreachable\]"):
            await fetch(VERSION, plan_of(), me, store(tmp_path), origin=down, rules=HASTY)
        with pytest.raises(NoSource, match="no source is known"):
            await fetch(VERSION, plan_of(), me, store(tmp_path))
