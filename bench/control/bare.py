"""The rivals: the same server library, with handlers that do the least.

- At `/bare` it reads the body and answers with as many bytes as the coordinator would: what HTTP costs anyhow.
- At `/checked` it decodes the message and checks its signatures as well: below this no coordinator can be that believes
  nobody, though it remembers nothing.
"""

import sys
import time

from aiohttp import web

from protocol.wire.message import Message
from protocol.wire.signing import open_envelope
from protocol.work.messages import Heartbeat, LeaseRequest, Register, Submission, open_request

MESSAGES: dict[str, type[Message]] = {
    "/v1/nodes": Register,
    "/v1/heartbeat": Heartbeat,
    "/v1/leases": LeaseRequest,
    "/v1/rollouts": Submission,
}


def main() -> None:
    port, round_id = int(sys.argv[1]), sys.argv[2]

    async def bare(request: web.Request) -> web.Response:
        await request.read()
        return _answer(request)

    async def checked(request: web.Request) -> web.Response:
        path = "/" + request.match_info["path"]
        now_ms = time.time_ns() // 1_000_000
        _, opened = open_request(await request.read(), round_id=round_id, path=path, now_ms=now_ms)
        message = MESSAGES[path].from_bytes(opened.body)
        if isinstance(message, Submission):
            for rollout in message.rollouts:
                open_envelope("rollout", rollout)
        return _answer(request)

    app = web.Application(client_max_size=2**24)
    app.router.add_get("/healthz", bare)
    app.router.add_post("/bare/{path:.*}", bare)
    app.router.add_post("/checked/{path:.*}", checked)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def _answer(request: web.Request) -> web.Response:
    size = int(request.query.get("reply", "0"))
    return web.Response(body=bytes(size), content_type="application/msgpack")


if __name__ == "__main__":
    main()
