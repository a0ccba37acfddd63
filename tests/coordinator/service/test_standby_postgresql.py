"""A round on PostgreSQL whose machine is lost: its replica and the copy of its folder go on together."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.config import load
from coordinator.service.backup import database, restoring
from coordinator.service.backup.archive import BackupInvalid, Sealer
from coordinator.service.backup.following import Follower
from coordinator.service.backup.restoring import TakeOver
from coordinator.service.round import Round
from ledger import store
from protocol.errors import ConfigInvalid
from tests.coordinator.served import serve
from tests.ledger import postgres

PASSPHRASE = "correct horse"

pytestmark = pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing() or "it is there")


@dataclass
class Replica:
    """A server that repeats what the first one writes, before that answers."""

    url: str
    folder: Path

    def promote(self) -> None:
        postgres.control(self.folder, "promote")


def quiet(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


@contextmanager
def replicated() -> Iterator[tuple[postgres.Server, Replica]]:
    """A server, and its replica, which acknowledges each commit."""
    with postgres.server(durable=False) as first, postgres.replica(first) as second:
        yield first, Replica(second.url, second.folder)


@pytest.mark.asyncio
async def test_promoted_replica_and_the_copy_of_the_folder_go_on_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    target, new = tmp_path / "standby", tmp_path / "new"
    settings = tmp_path / "round.toml"
    settings.write_text("")

    def take_over(url: str) -> restoring.Restored:
        return restoring.restore(
            target, new, store_url=url, passphrase=PASSPHRASE, seen=(), nothing_newer=True, tell=quiet,
            take_over=TakeOver(),
        )  # fmt: skip

    with replicated() as (first, replica):
        async with serve(tmp_path, f"store.url={first.url}") as served:
            with Follower(served.round.config, settings, target, Sealer(PASSPHRASE), quiet) as following:
                publishing = asyncio.create_task(served.publish())
                while not publishing.done():
                    await asyncio.to_thread(following.step)
                await publishing
                node = await served.join()
                for _ in range(3):
                    (lease,) = await served.lease(node)
                    (verdict,) = await served.submit(node, served.answer(node, lease))
                    assert verdict.outcome == "accepted"
                await served.round.publish_checkpoint()
                size = await served.round.database.read(store.size)
                await asyncio.to_thread(following.step)
            first.kill()
        shutil.rmtree(tmp_path / "round")
        replica.promote()
        made = take_over(replica.url)
        assert (made.ledger_size, made.version, made.gap_root) == (size, 1, 0)
        config = load(new / "operator.toml", [f"round.directory={new}", f"store.url={replica.url}"])
        ran = config.model_validate_json((new / "resolved.json").read_bytes())
        with closing(Round(ran)) as again:
            await again.publication.settle_orders()
            assert again.database.run_now(store.size) >= size
            with database.opened(replica.url) as connection:
                assert store.rebuild(connection, locked=False) == []
        shutil.rmtree(new)
        with postgres.server(durable=False) as other, pytest.raises((ConfigInvalid, BackupInvalid)):
            take_over(other.url)
