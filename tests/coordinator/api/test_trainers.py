"""Trainers that are not ours, over HTTP: what they may send, and what becomes of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse

from coordinator.base.clock import now_ms
from coordinator.publishing.publish import OFFERED
from coordinator.transactions import api_keys
from protocol.errors import ConfigInvalid
from protocol.policy import chunks, delta
from protocol.work.learning import OfferedVersion, OfferOutcome
from tests.coordinator.served import Served, serve
from tests.safetensors_files import file_of, next_file, policy_file

pytestmark = pytest.mark.asyncio

WEIGHTS = b"new weights"


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path, "learner.external=true") as made:
        await made.publish()
        yield made


async def make_key(served: Served, name: str = "trainer", *, publishes: bool = True) -> str:
    key: str = await served.round.database.run(api_keys.make, name, 10**6, publishes=publishes, now_ms=now_ms())
    return key


async def call(served: Served, key: str, method: str, path: str, data: bytes = b"") -> ClientResponse:
    headers = {"Authorization": f"Bearer {key}", "Accept": "application/json"}
    return await served.client.request(method, path, data=BytesIO(data), headers=headers)


async def send(served: Served, key: str, data: bytes = WEIGHTS, digest: str = "") -> ClientResponse:
    return await call(served, key, "PUT", f"/v1/trainer/files/{digest or chunks.digest(data)}", data)


async def offer(served: Served, key: str, body: Any = None) -> ClientResponse:
    body = {"files": {"model.safetensors": chunks.digest(WEIGHTS)}} if body is None else body
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(served, key, "POST", "/v1/trainer/versions", data)


async def code_of(response: ClientResponse) -> tuple[int, str]:
    return response.status, (await response.json())["code"]


async def taken(served: Served) -> OfferedVersion:
    """The next offer, as the learner's process gets it."""
    response = await served.client.get("/v1/learner/offers", headers=served.operator)
    assert response.status == 200
    return OfferedVersion.from_bytes(await response.read())


async def answer(served: Served, outcome: OfferOutcome) -> None:
    response = await served.client.post("/v1/learner/offers", data=outcome.to_bytes(), headers=served.operator)
    assert response.status == 204


def offered(served: Served) -> list[str]:
    """The files of trainers that are on the disk."""
    folder = served.round.publisher.uploads / OFFERED
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_an_offer_is_answered_with_the_version_that_the_learner_publishes(served: Served) -> None:
    key = await make_key(served)
    assert (await send(served, key)).status == 204
    waiting = asyncio.create_task(
        offer(served, key, {"files": {"model.safetensors": chunks.digest(WEIGHTS)}, "updates": 3})
    )
    wanted = await taken(served)
    assert (wanted.version, wanted.update) == (2, 3)
    folder = served.round.offered.folder(wanted.offer)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert await taken(served) == wanted, "a learner that was killed gets the same offer again"
    await served.publish(2, WEIGHTS)
    await answer(served, OfferOutcome(offer=wanted.offer, version=2))
    response = await waiting
    assert (response.status, await response.json()) == (200, {"version": 2, "changed": True})
    assert offered(served) == []


async def test_a_refusal_of_the_learner_is_the_trainers_error(served: Served) -> None:
    key = await make_key(served)
    await send(served, key)
    waiting = asyncio.create_task(offer(served, key))
    wanted = await taken(served)
    error = ConfigInvalid("model.safetensors contains NaN.", hint="Choose other weights.").to_wire()
    said = {name: error[name] for name in ("code", "message", "hint")}
    await answer(served, OfferOutcome.model_validate({"offer": wanted.offer, **said}))
    response = await waiting
    assert response.status == 422
    assert await response.json() == said
    assert offered(served) == []


async def test_two_trainers_stand_in_line(served: Served) -> None:
    keys = [await make_key(served, name) for name in ("one", "two")]
    for key in keys:
        await send(served, key)
    waiting = {asyncio.create_task(offer(served, key)) for key in keys}
    versions = []
    for number in (2, 3):
        wanted = await taken(served)
        assert wanted.version == number
        await served.publish(number, WEIGHTS)
        await answer(served, OfferOutcome(offer=wanted.offer, version=number))
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        versions += [(await (await task).json())["version"] for task in done]
    assert versions == [2, 3]


async def test_a_trainer_that_goes_away_holds_up_nobody(served: Served) -> None:
    gone, other = await make_key(served, "gone"), await make_key(served, "other")
    for key in (gone, other):
        await send(served, key)
    waiting = asyncio.create_task(offer(served, gone))
    first = await taken(served)
    waiting.cancel()
    staying = asyncio.create_task(offer(served, other))
    second = await taken(served)
    while second.offer == first.offer:  # until the server sees that the connection has closed
        await asyncio.sleep(0.01)
        second = await taken(served)
    await answer(served, OfferOutcome(offer=first.offer, version=2))  # too late: it changes nothing
    await served.publish(2, WEIGHTS)
    await answer(served, OfferOutcome(offer=second.offer, version=2))
    assert (await staying).status == 200


async def test_only_a_key_that_may_publish_sends_weights(served: Served) -> None:
    key = await make_key(served, publishes=False)
    assert await code_of(await send(served, key)) == (401, "not_authorised")
    assert await code_of(await offer(served, key)) == (401, "not_authorised")
    assert await code_of(await send(served, "es-unknown")) == (401, "key_refused")
    assert await code_of(await call(served, "", "GET", "/v1/key")) == (401, "key_refused")
    assert offered(served) == []


async def test_a_round_with_its_own_learner_takes_no_weights(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        key = await make_key(served)
        assert await code_of(await send(served, key)) == (409, "out_of_order")
        assert await code_of(await offer(served, key)) == (409, "out_of_order")


async def test_before_the_first_version_a_trainer_is_told_to_wait(tmp_path: Path) -> None:
    async with serve(tmp_path, "learner.external=true") as served:
        key = await make_key(served)
        assert await code_of(await call(served, key, "GET", "/v1/trainer/files")) == (409, "out_of_order")
        assert await code_of(await offer(served, key)) == (409, "out_of_order")


async def test_half_a_file_is_refused_and_nothing_of_it_stays(served: Served) -> None:
    key = await make_key(served)
    assert await code_of(await send(served, key, WEIGHTS[:5], chunks.digest(WEIGHTS))) == (422, "manifest_invalid")
    assert offered(served) == []
    assert await code_of(await offer(served, key)) == (404, "not_found")


async def test_a_file_much_larger_than_the_policy_is_refused(served: Served) -> None:
    key = await make_key(served)
    assert await code_of(await send(served, key, bytes(3 << 20))) == (413, "message_too_large")
    assert offered(served) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 10_000,
        {"files": {}},
        {"files": {"../keys/root.pem": "0" * 64}},
        {"files": {"model.safetensors": "short"}},
        {"files": {"model.safetensors": "0" * 64}, "updates": 0},
        {"files": {"model.safetensors": "0" * 64}, "updates": 10**9},
        {"files": {"model.safetensors": "0" * 64}, "other": 1},
        {"files": {f"{number}.safetensors": "0" * 64 for number in range(10_000)}},
    ],
)
async def test_an_offer_that_makes_no_sense_is_refused(served: Served, body: Any) -> None:
    status, code = await code_of(await offer(served, await make_key(served), body))
    assert (status, code) in {(400, "malformed_message"), (413, "message_too_large")}


async def test_a_key_shows_its_budget_and_the_versions(served: Served) -> None:
    key = await make_key(served, publishes=False)
    body = await (await call(served, key, "GET", "/v1/key")).json()
    assert (body["name"], body["budget_micros"], body["publishes"]) == ("trainer", 10**6, False)
    assert "digest" not in body
    body = await (await call(served, key, "GET", "/v1/trainer/versions")).json()
    assert body == {"newest_version": 1, "newest_update": 0, "max_staleness": 4, "held": []}


def patch_of(base: bytes, new: bytes) -> bytes:
    return b"".join(delta.encode(base, new, base_digest=chunks.digest(base)))


async def send_patch(served: Served, key: str, patch: bytes, base: bytes, digest: str) -> ClientResponse:
    return await call(served, key, "PUT", f"/v1/trainer/files/{digest}?base={chunks.digest(base)}", patch)


async def test_a_patch_from_the_newest_version_makes_the_file(served: Served) -> None:
    base = policy_file()
    new = next_file(base)
    await served.publish(2, base)
    key = await make_key(served)
    listed = await (await call(served, key, "GET", "/v1/trainer/files")).json()
    (entry,) = listed["files"]
    assert (listed["version"], entry["digest"], entry["size_bytes"]) == (2, chunks.digest(base), len(base))
    header = entry["header"].encode()
    assert base.startswith(len(header).to_bytes(8, "little") + header)
    patch = patch_of(base, new)
    assert len(patch) < len(new) // 10
    for _ in range(2):  # a repeated request changes nothing
        assert (await send_patch(served, key, patch, base, chunks.digest(new))).status == 204
    waiting = asyncio.create_task(offer(served, key, {"files": {"model.safetensors": chunks.digest(new)}}))
    wanted = await taken(served)
    assert (served.round.offered.folder(wanted.offer) / "model.safetensors").read_bytes() == new
    waiting.cancel()


async def test_the_base_of_a_patch_is_rebuilt_where_its_upload_is_lost(served: Served) -> None:
    base = policy_file()
    new = next_file(base)
    await served.publish(2, base)
    (served.round.publisher.uploads / "2" / "model.safetensors").unlink()
    key = await make_key(served)
    assert (await send_patch(served, key, patch_of(base, new), base, chunks.digest(new))).status == 204


@pytest.mark.parametrize(
    ("harm", "status", "code"),
    [
        ("half of it", 422, "patch_invalid"),
        ("nothing", 422, "patch_invalid"),
        ("bytes after it", 422, "patch_invalid"),
        ("no patch at all", 422, "patch_invalid"),
        ("another base", 422, "patch_invalid"),
        ("a base that is not here", 404, "not_found"),
        ("another file", 422, "patch_invalid"),
        ("a file too large", 413, "message_too_large"),
    ],
)
async def test_a_patch_that_does_not_make_the_file_is_refused_and_nothing_of_it_stays(
    served: Served, harm: str, status: int, code: str
) -> None:
    base, other = policy_file(), policy_file(seed=9)
    new = next_file(base)
    await served.publish(2, base)
    key, digest, patch, start = await make_key(served), chunks.digest(new), patch_of(base, new), base
    match harm:
        case "half of it":
            patch = patch[: len(patch) // 2]
        case "nothing":
            patch = b""
        case "bytes after it":
            patch += b"more"
        case "no patch at all":
            patch = new
        case "another base":
            patch = patch_of(other, new)
        case "a base that is not here":
            patch, start = patch_of(other, new), other
        case "another file":
            digest = chunks.digest(other)
        case "a file too large":
            patch = patch_of(base, file_of({"a": ("U8", bytes(4 << 20))}))
    assert await code_of(await send_patch(served, key, patch, start, digest)) == (status, code)
    assert offered(served) == []
    assert await code_of(await offer(served, key, {"files": {"model.safetensors": digest}})) == (404, "not_found")
    assert (await send(served, key, new)).status == 204, "the whole file is still taken"


async def test_only_a_key_that_may_publish_sends_patches(served: Served) -> None:
    base = policy_file()
    await served.publish(2, base)
    key = await make_key(served, publishes=False)
    assert await code_of(await send_patch(served, key, b"", base, "0" * 64)) == (401, "not_authorised")
    assert await code_of(await call(served, key, "GET", "/v1/trainer/files")) == (401, "not_authorised")
