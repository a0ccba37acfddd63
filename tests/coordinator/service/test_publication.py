"""An older version's weights, or other ones, as the next version: numbers go forward, books and signatures hold.

What is killed in between has happened, with its order, or has not.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
import pytest_asyncio
import sqlalchemy as sa

from coordinator.base.clock import now_ms
from coordinator.publishing.publish import Publisher
from coordinator.reports import versions as policies
from coordinator.service import publication
from coordinator.service.publication import Replacement, newest_replacement
from coordinator.store.facts import FINISHED, get_fact, set_fact
from coordinator.store.tables import batches, versions
from coordinator.transactions import batches as batch_table
from coordinator.transactions import orders, retractions
from coordinator.transactions.leases import latest_batch
from coordinator.transactions.policy_versions import newest_version
from ledger import store
from protocol.errors import ConfigInvalid, DiskFull, NotFound, OutOfOrder
from protocol.policy import chunks
from protocol.policy.manifest import target_path
from protocol.work.learning import LearnerState
from tests.coordinator.policy_files import policy_files
from tests.coordinator.served import Served, serve
from tests.ledger.values import node
from tests.safetensors_files import file_of, next_file, policy_file

pytestmark = pytest.mark.asyncio

FIRST = policy_file(1)
SECOND = next_file(FIRST, seed=2)
NAN = file_of({"a": ("BF16", bytes([0xC0, 0x7F]) * 20_000), "b": ("BF16", bytes(2))})


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A round with two versions."""
    async with serve(tmp_path, "staleness.max_updates=1") as served:
        await served.publish(1, FIRST)
        await served.publish(2, SECOND)
        yield served


async def ordered(served: Served, status: int = 200, **wanted: Any) -> dict[str, Any]:
    content = {"reason": "it collapsed", "given_by": "somebody@here", **wanted}
    headers = served.operator | {"Accept": "application/json"}
    response = await served.client.post("/v1/operator/versions", json=content, headers=headers)
    assert response.status == status, await response.text()
    found: dict[str, Any] = await response.json()
    return found


async def rollback(served: Served, version: int, status: int = 200) -> dict[str, Any]:
    return await ordered(served, status, action="rollback", version=version)


def staged(served: Served, weights: bytes, **other: bytes) -> str:
    name = publication.stage_name()
    folder = served.round.publisher.uploads / name
    folder.mkdir()
    for file, data in (policy_files(weights) | other).items():
        (folder / file).write_bytes(data)
    return name


async def state(served: Served) -> LearnerState:
    response = await served.client.get("/v1/learner/state", headers=served.operator)
    return LearnerState.from_bytes(await response.read())


async def test_an_older_version_comes_back_under_the_next_number_signed_logged_and_with_its_order(
    served: Served,
) -> None:
    entries = await served.round.database.read(store.size)
    assert await rollback(served, 1) == {"version": 3, "changed": True}
    publisher, database = served.round.publisher, served.round.database
    assert publisher.read_file(3, "model.safetensors") == FIRST
    assert target_path(3) in served.round.metadata.targets()
    assert await database.read(store.size) == entries + 1
    assert served.round.news.version == 3
    (given,) = await database.read(orders.about, "version 3")
    assert (given["action"], given["reason"]) == ("rollback", "version 1 again: it collapsed")
    assert given["given_by"] == "somebody@here"
    told = await state(served)
    assert (told.newest_version, told.replacement) == (3, 3)


async def test_the_learner_is_given_the_very_files_that_were_signed_even_if_its_upload_was_overwritten(
    served: Served,
) -> None:
    await rollback(served, 1)
    (served.round.publisher.uploads / "3" / "model.safetensors").write_bytes(b"of a learner that came too late")
    response = await served.client.get("/v1/learner/versions/3/model.safetensors", headers=served.operator)
    assert await response.read() == FIRST
    for path in ("/v1/learner/versions/9", "/v1/learner/versions/3/operator.token"):
        assert (await served.client.get(path, headers=served.operator)).status == 404
    assert (await served.client.get("/v1/learner/versions/3")).status == 401


async def test_the_next_version_stands_at_the_newest_batch_so_no_claim_changes_its_age(served: Served) -> None:
    def form(connection: sa.Connection) -> None:
        for number in (1, 2, 3):
            connection.execute(sa.insert(batches).values(batch=number, formed_ms=1, max_staleness=0))

    await served.round.database.run(form)
    await rollback(served, 1)
    found = await served.round.database.read(
        lambda connection: (
            connection.execute(sa.select(versions.c.policy_update).order_by(versions.c.version)).scalars().all()
        )
    )
    assert found == [0, 1, 3]
    assert await served.round.database.read(latest_batch) == 3


async def test_the_same_weights_as_the_newest_are_no_version(served: Served) -> None:
    assert await rollback(served, 2) == {"version": 2, "changed": False}
    await rollback(served, 1)
    assert await rollback(served, 1) == {"version": 3, "changed": False}
    assert not list(served.round.publisher.uploads.glob("ordered*"))


async def test_the_learners_own_version_of_that_number_is_overruled_and_the_one_after_it_follows(
    served: Served,
) -> None:
    await rollback(served, 1)
    await served.publish(
        3, SECOND
    )  # which it began before it heard: answered as if published, as when it repeats itself
    assert served.round.publisher.read_file(3, "model.safetensors") == FIRST
    await served.publish(4, SECOND)
    assert served.round.publisher.read_file(4, "model.safetensors") == SECOND
    assert (await state(served)).replacement == 3


@pytest.mark.parametrize("version", [0, 3, 99])
async def test_a_version_that_never_was_cannot_come_back(served: Served, version: int) -> None:
    assert (await rollback(served, version, 404))["code"] == NotFound.code


async def test_a_version_whose_chunks_are_gone_is_refused_by_name(served: Served) -> None:
    weights = FIRST
    for number in range(3, 7):
        weights = policy_file(number)
        await served.publish(number, weights)
    said = await rollback(served, 1, 404)
    assert "no longer kept" in said["message"]


async def test_staged_weights_are_published_once(served: Served) -> None:
    name = staged(served, next_file(SECOND, seed=7))
    assert await ordered(served, action="publish", stage=name) == {"version": 3, "changed": True}
    assert served.round.publisher.read_file(3, "model.safetensors") == next_file(SECOND, seed=7)
    assert (await ordered(served, 404, action="publish", stage=name))["code"] == NotFound.code


async def test_weights_that_are_no_numbers_are_refused_and_nothing_is_left(served: Served) -> None:
    name = staged(served, NAN)
    said = await ordered(served, 422, action="publish", stage=name)
    assert "model.safetensors contains NaN or infinite values in a" in said["message"]
    assert (await state(served)).newest_version == 2
    assert not (served.round.publisher.uploads / name).exists()


async def test_other_files_than_versions_have_are_refused(served: Served) -> None:
    name = staged(served, FIRST, **{"modeling.py": b"import os"})
    said = await ordered(served, 422, action="publish", stage=name)
    assert "modeling.py" in said["message"]


@pytest.mark.parametrize("stage", ["../keys", "ordered-1", "1", ""])
async def test_no_other_folder_than_a_staged_one_is_published(served: Served, stage: str) -> None:
    await ordered(served, 404 if not stage else 400, action="publish", stage=stage)


@pytest.mark.parametrize("wanted", [{"action": "undo"}, {"action": "rollback", "version": -1}, {"reason": ""}])
async def test_what_is_no_order_is_refused(served: Served, wanted: dict[str, Any]) -> None:
    await ordered(served, 400, **{"action": "rollback", "version": 1, **wanted})


async def test_strangers_order_nothing(served: Served) -> None:
    response = await served.client.post("/v1/operator/versions", json={})
    assert response.status == 401


async def test_nothing_replaces_the_policy_of_a_finished_round(served: Served) -> None:
    await served.round.database.run(set_fact, FINISHED, True)
    assert (await rollback(served, 1, 409))["code"] == OutOfOrder.code


async def test_whoever_publishes_before_the_first_version_is_told_what_to_do(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        told = await rollback(served, 1, 409)
        assert "shows version 1" in told["hint"]
        assert "model.path" in told["hint"]


async def test_a_learner_that_merges_adapters_is_not_sent_back(tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.lora_rank=4", "learner.publish_adapters=false") as served:
        await served.publish(1, FIRST)
        assert (await rollback(served, 1, 422))["code"] == ConfigInvalid.code


async def test_a_retraction_whose_weights_are_those_of_the_newest_version_is_published_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's state differs from it: the updates since then are taken back."""
    made = {
        "owners": [node(1)], "first": 1, "last": 1, "before": "1" * 64, "after": "9" * 64, "left_out": 1,
        "left_out_root": "c" * 64,
    }  # fmt: skip
    monkeypatch.setattr(retractions, "require_current", lambda *_, **__: None)  # no batch was formed here
    for changed in (True, False):
        stage = staged(served, SECOND)
        assert await ordered(served, action="retract", retraction=made, stage=stage) == {
            "version": 3,
            "changed": changed,
        }
    told = await state(served)
    assert (told.replacement, told.retracted) == (3, "9" * 64)


@pytest.mark.parametrize("point", ["unsigned", "signed"])
async def test_a_retraction_at_which_signing_fails_is_forgotten_or_holds_batches_until_it_is_repeated(
    served: Served, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The entry names the newest batch: none may be formed between a signature and the entry."""
    made = {
        "owners": [node(1)], "first": 1, "last": 1, "before": "1" * 64, "after": "9" * 64, "left_out": 1,
        "left_out_root": "c" * 64,
    }  # fmt: skip
    held = partial(batch_table.hold, for_s=retractions.UNTIL_SETTLED_S, now_ms=now_ms())
    # No batch was formed here: of the check, only the hold is left.
    monkeypatch.setattr(retractions, "require_current", lambda connection, *_, **__: held(connection))
    here, order = served.round.publication, dict[str, Any](action="retract", retraction=made)
    with monkeypatch.context() as broken:
        broken.setattr(here, "sign" if point == "unsigned" else "activate", _full_disk)
        await ordered(served, 507, **order, stage=staged(served, SECOND))
    response = await served.client.post("/v1/operator/hold", json={"for_s": 0}, headers=served.operator)
    assert response.status == 200
    is_held = await served.round.database.read(get_fact, batch_table.HELD) > now_ms() + 1000
    assert is_held is (point == "signed")
    changed = await ordered(served, **order, stage=staged(served, SECOND))
    assert changed == {"version": 3, "changed": point == "unsigned"}
    assert (await state(served)).retracted == "9" * 64
    assert await served.round.database.read(get_fact, batch_table.HELD) == 0


async def _full_disk(*_: object) -> None:
    raise DiskFull("The disk is full.")


class Killed(Exception):
    """The process ends here."""


async def test_a_kill_between_the_hold_and_the_order_of_a_retraction_leaves_neither(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever end such a hold: no order is there to be settled."""
    made = {
        "owners": [node(1)], "first": 1, "last": 1, "before": "1" * 64, "after": "9" * 64, "left_out": 1,
        "left_out_root": "c" * 64,
    }  # fmt: skip
    held = partial(batch_table.hold, for_s=retractions.UNTIL_SETTLED_S, now_ms=now_ms())
    # No batch was formed here: of the check, only the hold is left.
    monkeypatch.setattr(retractions, "require_current", lambda connection, *_, **__: held(connection))

    def killed(*_: object) -> None:
        raise Killed

    order = {"action": "retract", "retraction": made, "stage": staged(served, SECOND)}
    wanted = Replacement.model_validate(order | {"reason": "a trigger", "given_by": "me"})
    monkeypatch.setattr(publication, "set_fact", killed)  # the point of the kill: between hold and order
    with pytest.raises(Killed):
        await served.round.publication.replace(wanted)
    assert await served.round.database.read(get_fact, batch_table.HELD) == 0


@pytest.mark.parametrize(
    ("for_s", "stays"), [(retractions.HOLD_MAX_S - 60, True), (retractions.UNTIL_SETTLED_S, False)]
)
async def test_a_hold_that_no_command_asks_for_ends_if_there_is_no_order(
    served: Served, for_s: float, stays: bool
) -> None:
    await served.round.database.run(batch_table.hold, for_s, now_ms())
    await served.round.publication.settle_orders()
    assert (await served.round.database.read(get_fact, batch_table.HELD) > 0) is stays


async def test_a_signed_order_whose_activation_failed_is_activated_with_the_next_timestamp(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a retraction holds batches until then, and its operator may not repeat it."""
    here = served.round.publication
    with monkeypatch.context() as broken:
        broken.setattr(here, "activate", _full_disk)
        await rollback(served, 1, 507)
        with pytest.raises(DiskFull):
            await here.renew_timestamp()
    assert (await served.round.database.read(newest_version))[0] == 2
    await here.renew_timestamp()
    assert (await served.round.database.read(newest_version))[0] == 3
    assert await served.round.database.read(get_fact, publication.ORDERED) is None


@pytest.mark.parametrize("point", ["intended", "signed"])
async def test_a_kill_in_between_leaves_it_done_or_not_done(tmp_path: Path, point: str) -> None:
    async with serve(tmp_path) as served:
        await served.publish(1, FIRST)
        await served.publish(2, SECOND)
        here = served.round.publication
        wanted = Replacement(action="rollback", version=1, reason="because", given_by="me")

        async def killed(*_: object) -> None:
            raise Killed

        if point == "intended":
            here.sign = killed  # type: ignore[method-assign,assignment]  # the process is gone at this line
        else:
            here.activate = killed  # type: ignore[method-assign,assignment]  # the process is gone at this line
        with pytest.raises(Killed):
            await here.replace(wanted)
    shutil.rmtree(tmp_path / "round" / "uploads" / "3")
    async with serve(tmp_path) as served:
        await served.round.publication.settle_orders()
        version, _ = await served.round.database.read(newest_version)
        assert version == (3 if point == "signed" else 2)
        assert await served.round.database.read(newest_replacement) == (3 if point == "signed" else 0)
        assert await served.round.database.read(get_fact, publication.ORDERED) is None
        assert len(await served.round.database.read(orders.about, "version 3")) == (point == "signed")
        again = await served.round.publication.replace(wanted)
        assert again == {"version": 3, "changed": point == "intended"}
        response = await served.client.get("/v1/learner/versions/3/model.safetensors", headers=served.operator)
        assert await response.read() == FIRST


async def test_a_version_of_the_learners_that_is_signed_and_not_entered_keeps_its_number(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish(1, FIRST)

        async def killed(*_: object) -> None:
            raise Killed

        served.round.publication.activate = killed  # type: ignore[method-assign,assignment]  # the process is gone at this line
        with pytest.raises(AssertionError):
            await served.publish(2, SECOND)
    async with serve(tmp_path) as served:
        assert await rollback(served, 1) == {"version": 3, "changed": True}
        assert served.round.publisher.read_file(2, "model.safetensors") == SECOND
        assert (await state(served)).replacement == 3


async def test_rollback_reaches_every_version_that_the_operator_keeps(tmp_path: Path) -> None:
    """The three newest, and every fourth for ever; the others are gone, and the hint names the setting."""
    kept = ("staleness.max_updates=0", "publish.patches=false", "publish.keep=3", "publish.keep_every=4")
    async with serve(tmp_path, *kept) as served:
        weights = {version: policy_file(version) for version in range(1, 11)}
        for version, data in weights.items():
            await served.publish(version, data)
        here = served.round
        rows = await here.database.read(policies.listed, here.publisher, here.metadata, last=0)
        assert [row["version"] for row in rows if row["kept"]] == [10, 9, 8, 4]
        assert "publish.keep" in str(await rollback(served, 7, 404))
        for version in (4, 8):
            done = await rollback(served, version)
            assert here.publisher.read_file(done["version"], "model.safetensors") == weights[version]


async def test_versions_younger_than_the_operator_says_are_kept(tmp_path: Path) -> None:
    async with serve(tmp_path, "staleness.max_updates=0", "publish.patches=false", "publish.keep_h=1") as served:
        for version in range(1, 5):
            await served.publish(version, policy_file(version))
        aged = sa.update(versions).where(versions.c.version == 1).values(published_ms=1)
        await served.round.database.run(lambda connection: connection.execute(aged))
        await served.publish(5, policy_file(5))
        await rollback(served, 1, 404)
        assert await rollback(served, 2) == {"version": 6, "changed": True}


WHOLE = bytes(8 << 20)
"""A file that takes long enough to write for all to write it at once."""


class Rebuilding:
    """A publisher of a restored round, which has chunks and no uploads."""

    def __init__(self, folder: Path) -> None:
        self.uploads, self.rebuilt = folder / "uploads", 0

    def read_file(self, _version: int, _name: str) -> bytes:
        self.rebuilt += 1
        return WHOLE


async def test_a_file_that_many_ask_for_at_once_is_rebuilt_once_and_whole(tmp_path: Path) -> None:
    askers, name = 4, "model.safetensors"
    publisher, all_here = Rebuilding(tmp_path), Barrier(askers)

    def read() -> bytes:
        all_here.wait()
        return publication.file_of(cast(Publisher, publisher), 1, name, chunks.digest(WHOLE)).read_bytes()

    assert await asyncio.gather(*(asyncio.to_thread(read) for _ in range(askers))) == [WHOLE] * askers
    assert [path.name for path in (tmp_path / "uploads" / "1").iterdir()] == [name]
    assert publisher.rebuilt == 1
