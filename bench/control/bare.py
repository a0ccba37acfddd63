"""The rival: the same server library, which reads the body and answers with as many bytes as the coordinator would."""

import sys

from aiohttp import web


async def answer(request: web.Request) -> web.Response:
    await request.read()
    size = int(request.query.get("reply", "0"))
    return web.Response(body=bytes(size), content_type="application/msgpack")


def main() -> None:
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/{path:.*}", answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()
