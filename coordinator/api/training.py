"""Routes with which anyone replays an update of the learner: settings, checkpoints, the starting policy and batches.

- Only what the replay of a drawn update needs is served (`learner.kept_one_in`), and only if the learner runs on this
  machine. Its prompts and completions are public then. Of the newest checkpoints, most are not needed.
- Nothing here is trusted: the reader compares digests and roots with the log. Files come in parts of
  `limits.TRAINING_PART_BYTES`, of which a reader holds one piece in memory, however slowly it reads.
- Batches are read beside the writer: strangers who ask for many do not delay nodes.
"""

import asyncio
import json
import os
import stat
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from coordinator.api.http import ROUND, reply
from coordinator.api.strangers import read_for_stranger
from coordinator.service.round import Round
from coordinator.transactions import commitments
from protocol import limits
from protocol.errors import MalformedMessage, NotFound
from protocol.policy.manifest import FileName

routes = web.RouteTableDef()

START = "start"

PIECE_BYTES = limits.MIB
"""Bytes of a file that one reader has in memory."""

_FILE_NAME = TypeAdapter(FileName)


@routes.get("/v1/training/settings/{digest:[0-9a-f]{64}}")
async def settings(request: web.Request) -> web.Response:
    """Return the settings of updates by the digest that the log has of them."""
    text = await read_for_stranger(request, commitments.settings, request.match_info["digest"])
    if text is None:
        raise NotFound("No update was made with these settings.")
    return web.Response(body=text.encode(), content_type="application/json")


@routes.get("/v1/training/kept")
async def kept(request: web.Request) -> web.Response:
    """Return the checkpoints that are kept and the files of the starting policy, with the sizes of all files."""
    round_ = request.app[ROUND]
    if not round_.config.learner.kept_one_in:
        raise NotFound("This round keeps no updates for replays.", hint="The operator can set learner.kept_one_in.")
    starts = await _starts(request)
    listed = await asyncio.to_thread(_listed, _folder(round_), sorted(starts))
    return web.Response(body=json.dumps(listed).encode(), content_type="application/json")


@routes.get("/v1/training/batches/{number:[0-9]{1,12}}")
async def batch(request: web.Request) -> web.Response:
    """Return a batch that the replay of a drawn update needs."""
    number = int(request.match_info["number"])
    if not any(start < number <= last for start, last in (await _starts(request)).items()):
        raise NotFound(f"Batch {number} is not kept for a replay.")
    return reply(await read_for_stranger(request, commitments.kept_batch, number))


@routes.get("/v1/training/{folder:start|checkpoints/[0-9]{9}}/{name}/{part:[0-9]{1,6}}")
async def part(request: web.Request) -> web.StreamResponse:
    """Return a part of a file of the starting policy or of a checkpoint."""
    round_ = request.app[ROUND]
    folder, name, number = request.match_info["folder"], request.match_info["name"], int(request.match_info["part"])
    if name != ".metadata":
        try:
            _FILE_NAME.validate_python(name)
        except ValidationError:
            raise MalformedMessage("The name of the file is not valid.") from None
    kept = round_.config.learner.kept_one_in and (
        folder == START or int(folder.removeprefix("checkpoints/")) in await _starts(request)
    )
    file = await asyncio.to_thread(_open, _folder(round_) / folder / name, number) if kept else None
    if file is None:
        raise NotFound("There is no such part of a file.")
    with file:
        left = min(os.fstat(file.fileno()).st_size - file.tell(), limits.TRAINING_PART_BYTES)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = left
        await response.prepare(request)
        while (
            left and request.method == "GET" and (piece := await asyncio.to_thread(file.read, min(left, PIECE_BYTES)))
        ):
            await response.write(piece)  # waits until the client has read
            left -= len(piece)
    if left and request.method == "GET":  # the file became shorter
        response.force_close()
    else:
        await response.write_eof()
    return response


def _folder(round_: Round) -> Path:
    return round_.config.round.directory / "learner"


def _checkpoints(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints that are there."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


async def _starts(request: web.Request) -> dict[int, int]:
    """Return the checkpoints with which replays of drawn updates begin, each with the last of these updates."""
    round_ = request.app[ROUND]
    if not round_.config.learner.kept_one_in:
        return {}
    drawn = await read_for_stranger(request, commitments.drawn_before)
    numbers = await asyncio.to_thread(_checkpoints, _folder(round_))
    found: dict[int, int] = {}
    for update in sorted(drawn):
        if place := bisect_left(numbers, update):
            found[numbers[place - 1]] = update
    return found


def _listed(folder: Path, starts: Sequence[int]) -> dict[str, dict[str, dict[str, int]]]:
    """Return folder → file → size in bytes."""
    names = [START, *(f"checkpoints/{number:09d}" for number in starts)]
    return {"folders": {name: _sizes(folder / name) for name in names}}


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    except FileNotFoundError:  # it was just removed
        return {}


def _open(path: Path, number: int) -> BinaryIO | None:
    """Return a file at the beginning of a part; None beyond its end, if it is gone, or if it is no file of its own."""
    begin = number * limits.TRAINING_PART_BYTES
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError:
        return None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or begin >= found.st_size:
        file.close()
        return None
    file.seek(begin)
    return file
