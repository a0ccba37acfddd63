"""The files for replays over HTTP: nothing unless the operator says so, and then nothing else of the machine."""

import mmap
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.store.facts import set_fact
from coordinator.transactions.commitments import DRAWN
from protocol import limits
from tests.coordinator.served import serve

pytestmark = pytest.mark.asyncio

PATHS = ("kept", "batches/1", "start/config.json/0", "checkpoints/000000003/__0_0.distcp/0")


def lay_out(folder: Path) -> None:
    """Write what a learner has on the disk."""
    for name, data in (("start/config.json", b"{}"), ("checkpoints/000000003/.metadata", b"m"), ("base/secret", b"s")):
        (folder / "learner" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "learner" / name).write_bytes(data)
    (folder / "learner" / "checkpoints" / "000000003" / "__0_0.distcp").write_bytes(
        bytes(limits.TRAINING_PART_BYTES) + b"end"
    )
    (folder / "learner" / "checkpoints" / "000000004.new").mkdir()


async def test_nothing_is_served_of_a_round_that_keeps_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        lay_out(served.round.config.round.directory)
        for path in PATHS:
            assert (await served.client.get(f"/v1/training/{path}")).status == 404


async def test_files_come_in_parts_and_their_list_says_how_many(tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.kept_one_in=2") as served:
        lay_out(served.round.config.round.directory)
        await served.round.database.run(set_fact, DRAWN, {"through": 5, "updates": [5]})
        listed = (await (await served.client.get("/v1/training/kept")).json())["folders"]
        size = limits.TRAINING_PART_BYTES + 3
        assert listed == {
            "start": {"config.json": 2},
            "checkpoints/000000003": {".metadata": 1, "__0_0.distcp": size},
        }
        file = "/v1/training/checkpoints/000000003/__0_0.distcp"
        assert len(await (await served.client.get(f"{file}/0")).read()) == limits.TRAINING_PART_BYTES
        assert await (await served.client.get(f"{file}/1")).read() == b"end"
        assert (await served.client.get(f"{file}/2")).status == 404
        asked = await served.client.head(f"{file}/1")
        assert (asked.status, asked.headers["Content-Length"]) == (200, "3")
        assert await (await served.client.get("/v1/training/checkpoints/000000003/.metadata/0")).read() == b"m"


@pytest.mark.parametrize(
    "path",
    [
        "start/..%2f..%2foperator.token/0",
        "checkpoints/000000003/..%2f..%2f..%2fstate.db/0",
        "checkpoints/..%2f..%2f/operator.token/0",
        "start/%2e%2e/0",
        "base/secret/0",
        "checkpoints/000000004.new/x/0",
        "batches/1",
        "settings/" + "0" * 64,
    ],
)
async def test_nothing_else_of_the_round_can_be_read(path: str, tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.kept_one_in=2") as served:
        lay_out(served.round.config.round.directory)
        assert (await served.client.get(f"/v1/training/{path}")).status in (400, 404, 422)


async def test_a_checkpoint_that_no_drawn_update_begins_with_is_not_served(tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.kept_one_in=2") as served:
        lay_out(served.round.config.round.directory)
        await served.round.database.run(set_fact, DRAWN, {"through": 5, "updates": [2, 3]})
        assert list((await (await served.client.get("/v1/training/kept")).json())["folders"]) == ["start"]
        for path in ("checkpoints/000000003/__0_0.distcp/0", "batches/4"):
            assert (await served.client.get(f"/v1/training/{path}")).status == 404


async def test_neither_links_nor_pipes_nor_folders_are_read(tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.kept_one_in=2") as served:
        start = served.round.config.round.directory / "learner" / "start"
        lay_out(served.round.config.round.directory)
        (start / "link").symlink_to("/etc/passwd")
        (start / "folder").mkdir()
        os.mkfifo(start / "pipe")
        for name in ("link", "folder", "pipe"):
            assert (await served.client.get(f"/v1/training/start/{name}/0")).status == 404


async def test_readers_that_do_not_read_hold_no_parts_in_memory(tmp_path: Path) -> None:
    """Each of them asks for 64 MiB and reads nothing; a reader in earnest gets its part meanwhile."""
    async with serve(tmp_path, "learner.kept_one_in=2") as served:
        lay_out(served.round.config.round.directory)
        (served.round.config.round.directory / "learner" / "start" / "large").write_bytes(
            bytes(limits.TRAINING_PART_BYTES)
        )
        before = resident_bytes()
        with ExitStack() as stack:
            for _ in range(12):
                client = stack.enter_context(socket.create_connection((served.client.host, served.client.port)))
                client.sendall(b"GET /v1/training/start/large/0 HTTP/1.1\r\nHost: here\r\n\r\n")
            honest = await served.client.get("/v1/training/start/large/0")
            assert len(await honest.read()) == limits.TRAINING_PART_BYTES
            assert resident_bytes() - before < 4 * limits.TRAINING_PART_BYTES


def resident_bytes() -> int:
    """Return the resident memory of this process, which is also the server's."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
