"""Ours and stock py-libp2p on one wire: whoever dials, whoever listens, what is sent is what arrives."""

from hashlib import blake2b
from random import Random
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamEOF

from tests.swarm_node.muxed_world import PROTOCOL, host_of, info_of
from tests.swarm_node.p2p_world import PATIENT_SECONDS

pytestmark = pytest.mark.trio

SIZES = (1, 2, 100, 65_507, 65_508, 262_143, 262_144, 262_145, 300_000, 700_000)
"""Sizes around nothing, one frame, one window; and several windows."""
STREAMS = 24


async def read_to_the_end(stream: Any) -> bytes:
    got = bytearray()
    while True:
        try:
            got += await stream.read(100_000)
        except StreamEOF:
            return bytes(got)


async def answer(stream: Any) -> None:
    """Take the question to its end; answer with its digest and itself."""
    question = await read_to_the_end(stream)
    await stream.write(blake2b(question).digest())
    await stream.write(question)
    await stream.close_write()


async def ask(host: Any, peer: Any, size: int, answered: list[int]) -> None:
    question = Random(size).randbytes(size)
    stream = await host.new_stream(peer, [TProtocol(PROTOCOL)])
    await stream.write(question)
    await stream.close_write()
    assert await read_to_the_end(stream) == blake2b(question).digest() + question
    answered.append(size)


@pytest.mark.parametrize(("dialer", "listener"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours")])
async def test_streams_of_all_sizes_cross_both_ways(dialer: str, listener: str) -> None:
    answered: list[int] = []
    async with host_of(dialer, 1) as one, host_of(listener, 2) as two:
        for host in (one, two):
            host.set_stream_handler(TProtocol(PROTOCOL), answer)
        await one.connect(info_of(two))
        with trio.fail_after(PATIENT_SECONDS):
            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    host, peer = ((one, two), (two, one))[number % 2]
                    nursery.start_soon(ask, host, peer.get_id(), SIZES[number % len(SIZES)], answered)
    assert len(answered) == STREAMS
