"""A mirror that flips a byte in every chunk it sends, from one SIGUSR1 to the next: a real node with one lie."""

import json
import signal
import sys
from types import FrameType

from protocol.wire.frames import Chunk, Message
from swarm_node import cli
from swarm_node.p2p.link import Link

_honest_send = Link.send
_lying = False


def _toggle(_number: int, _frame: FrameType | None) -> None:
    global _lying  # a signal handler has no other place to write to
    _lying = not _lying


async def _send(link: Link, message: Message, *, stall_s: float) -> None:
    if _lying and isinstance(message, Chunk):
        data = bytearray(message.data)
        data[len(data) // 2] ^= 1
        message = Chunk(message.chunk, bytes(data))
        print(json.dumps({"lie": message.chunk}), flush=True)
    await _honest_send(link, message, stall_s=stall_s)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _toggle)
    Link.send = _send  # type: ignore[assignment,method-assign]  # all else must be the shipped node
    sys.argv = ["swarm-node", "mirror", *sys.argv[1:]]
    cli.main()
