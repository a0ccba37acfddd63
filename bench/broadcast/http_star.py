"""The HTTP star: a plain static server at the source, and a client at every worker that fetches the same chunks.

- Clients know the list of chunks beforehand, fetch several at a time over kept connections, and check each by its hash.
- As a program, `serve FOLDER HOST PORT` is the server, and `fetch URL` a client told what to fetch on standard input.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from aiohttp import ClientSession, web

from bench.broadcast.contender import PAYLOAD, SOURCE, Outcome, bad_bytes, workers_of
from bench.broadcast.net import Net
from bench.broadcast.program import Program, module
from protocol import limits
from protocol.ids import ChunkId
from protocol.policy import chunks

PORT = 8800
CHUNK_BYTES = limits.MIB
"""The size of a chunk: ours by default."""

AT_ONCE = 4


class HttpStar:
    """A server and its clients."""

    name = "HTTP star"

    def __init__(self, net: Net, folder: Path) -> None:
        self._net, self._folder = net, folder
        self._programs: dict[str, Program] = {}
        self._count = 0

    def start(self) -> None:
        served, address = self._folder / "served", self._net.address(SOURCE)
        served.mkdir(parents=True)
        for party in self._net.parties:
            role = ["fetch", f"http://{address}:{PORT}"]
            if party == SOURCE:
                role = ["serve", str(served), address, str(PORT)]
            log = self._folder / "logs" / f"{party}.log"
            self._programs[party] = Program(self._net, party, [*module("http_star"), *role], log)
        for program in self._programs.values():
            program.heard("ready", lambda line: "ready" in line)

    def broadcast(self, payload: Path, *, within_s: float) -> Outcome:
        self._count += 1
        number, data = self._count, payload.read_bytes()
        names = []
        for piece in chunks.split(data, CHUNK_BYTES):
            names.append(chunks.chunk_id(piece))
            (self._folder / "served" / names[-1]).write_bytes(piece)
        copies = {worker: self._folder / worker / str(number) / PAYLOAD for worker in workers_of(self._net)}
        began_at_s = time.time()
        for worker, copy in copies.items():
            copy.parent.mkdir(parents=True)
            self._programs[worker].tell({"names": names, "copy": str(copy), "number": number})
        done = {
            worker: self._programs[worker].heard("the end", lambda line: line.get("done") == number, within_s=within_s)
            for worker in copies
        }
        outcome = Outcome(
            began_at_s=began_at_s,
            seconds={worker: line["at_s"] - began_at_s for worker, line in done.items()},
            bad_bytes=sum(bad_bytes(copy, payload) for copy in copies.values()),
            bytes_from={"from_http": len(data) * len(copies)},
        )
        for copy in copies.values():
            copy.unlink()
        for name in names:
            (self._folder / "served" / name).unlink()
        return outcome

    def close(self) -> None:
        for program in self._programs.values():
            program.kill()


async def serve(folder: Path, host: str, port: int) -> None:
    """Serve a folder until standard input ends."""
    app = web.Application()
    app.router.add_static("/", folder)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(json.dumps({"ready": True}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


async def fetch_all(url: str) -> None:
    """Fetch what each line of standard input asks for, until it ends."""
    async with ClientSession(url) as session:
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            await fetch(session, order["names"], Path(order["copy"]))
            print(json.dumps({"done": order["number"], "at_s": time.time()}), flush=True)


async def fetch(session: ClientSession, names: list[str], copy: Path) -> None:
    """Fetch the chunks of one file, several at a time, each checked and written where it belongs."""
    left = list(enumerate(names))[::-1]
    with copy.open("wb") as file:

        async def worker() -> None:
            while left:
                number, name = left.pop()
                async with session.get(f"/{name}") as response:
                    data = await response.read()
                chunks.verify(ChunkId(name), data)
                file.seek(number * CHUNK_BYTES)
                file.write(data)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


def main(role: str, *arguments: str) -> None:
    """Play one part."""
    if role == "serve":
        folder, host, port = arguments
        asyncio.run(serve(Path(folder), host, int(port)))
    else:
        asyncio.run(fetch_all(*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
