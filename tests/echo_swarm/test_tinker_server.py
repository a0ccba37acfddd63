"""The server on a real socket: order, repeats, replies, refusals. The swarm is a list of what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from coordinator.learner.embedded import EmbeddedShape, make_policy
from echo_swarm.rollouts import Rollout, RolloutSample
from echo_swarm.tinker.forms import INT64, message
from echo_swarm.tinker.lora import SharedBase
from echo_swarm.tinker.replies import FinishedReply, NumberedRequest, Replies, RequestLine
from echo_swarm.tinker.server import create_app
from echo_swarm.tinker.service import ServedPolicy, TinkerService
from protocol.errors import NotFound, OutOfOrder, Overloaded, SwarmError

pytestmark = pytest.mark.asyncio


class SwarmOnPaper:
    """A swarm that records what it is asked, and answers each sample with three tokens."""

    def __init__(self) -> None:
        self.asked = list[tuple[Any, ...]]()
        self.fails_with: SwarmError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def publish(self, folder: Path, *, updates: int) -> int:
        weights = sorted(path.name for path in folder.glob("*.safetensors"))  # noqa: ASYNC240  # a few files in a test
        self.asked.append(("publish", weights, updates))
        return 1 + len(self.asked)

    async def sample(self, prompts: list[list[int]], n: int, **chosen: Any) -> list[Rollout]:
        given = {name: value for name, value in chosen.items() if value not in (None, [])}
        self.asked.append(("sample", prompts[0], n, given))
        await self.gate.wait()
        if self.fails_with:
            raise self.fails_with
        one = RolloutSample((5, 6, 7), (-1.0, -2.0, -3.0), "abc", "length", "receipt")
        return [Rollout(tuple(prompts[0]), (one,) * n, chosen["version"])]


class Client:
    """A client of the server that speaks HTTP."""

    def __init__(self, http: httpx.AsyncClient, swarm: SwarmOnPaper, service: TinkerService, policy: Path) -> None:
        self.http, self.swarm, self.service, self.policy = http, swarm, service, policy

    async def post(self, path: str, /, **body: Any) -> Any:
        response = await self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, status: int, /, **body: Any) -> str:
        response = await self.http.post(f"/api/v1/{path}", json=body)
        assert response.status_code == status, response.text
        return str(response.json()["detail"])

    async def reply(self, promise: Mapping[str, Any]) -> Any:
        response = await self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        assert response.status_code == 200, response.text
        if response.headers["content-type"] == "application/x-protobuf":
            return response.content
        return response.json()

    async def model(self, session_id: str = "", number: int = 0) -> str:
        session_id = session_id or (await self.post("create_session", tags=[]))["session_id"]
        asked = {"session_id": session_id, "model_seq_id": number, "base_model": str(self.policy)}
        made = await self.reply(await self.post("create_model", **asked, lora_config={"rank": 2, "seed": 1}))
        return str(made["model_id"])

    async def forward_backward(self, model_id: str, number: int, **more: Any) -> Any:
        body = message("ForwardBackwardRequest", model_id=model_id, seq_id=number, data=[EXAMPLE], **more)
        response = await self.http.post(
            "/api/v1/forward_backward",
            content=body.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
        )
        assert response.status_code == 200, response.text
        return response.json()


def _example() -> Any:
    tokens = message("EncodedText", tokens=np.asarray([5, 6, 7], np.int32).tobytes())
    target = message("Tensor", dense=np.asarray([6, 7, 8], np.int64).tobytes(), dtype=INT64, shape=[3])
    inputs = [message("LossInput", key="target_tokens", value=target)]
    return message("Datum", model_input=[message("Chunk", encoded_text=tokens)], loss_fn_inputs=inputs)


EXAMPLE = _example()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker") / "policy"
    make_policy(folder, seed=1, shape=EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=32))
    return folder


@asynccontextmanager
async def serving(policy: Path, states: Path, adapter_rank: int = 0) -> AsyncIterator[Client]:
    base = SharedBase(AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32))
    swarm = SwarmOnPaper()
    service = TinkerService(swarm, base, ServedPolicy(policy, "tiny", adapter_rank), states)  # type: ignore[arg-type]  # a fake that records
    runner = web.AppRunner(create_app(service, "es-1"))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers={"X-API-Key": "tml-es-1"}) as http:
            yield Client(http, swarm, service, policy)
    finally:
        await runner.cleanup()
        await service.close()


async def test_requests_run_in_the_order_of_their_numbers_however_they_arrive(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        model_id = await client.model()
        adam = {"learning_rate": 0.1}
        step = await client.post("optim_step", model_id=model_id, seq_id=3, adam_params=adam)
        second = await client.forward_backward(model_id, 2, loss_fn="cross_entropy")
        first = await client.forward_backward(model_id, 1, loss_fn="cross_entropy")
        assert await client.forward_backward(model_id, 1, loss_fn="cross_entropy") == first, "a repeat runs nothing"
        output = message("ForwardBackwardOutput")
        output.ParseFromString(await client.reply(first))
        assert {entry.key for entry in output.metrics} == {"loss:sum"}
        (record,) = output.loss_fn_outputs
        assert (record.num_datums, len(record.fields[0].value.data)) == (1, 12)
        assert await client.reply(second) == await client.reply(first) == await client.reply(first)
        assert (await client.reply(step))["metrics"]["grad_norm:mean"] > 0
        assert client.service.find_model(model_id).trained.steps == 1


async def test_weights_are_published_when_they_changed_and_the_version_is_pinned(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        model_id = await client.model()
        for number in (1, 3):
            await client.forward_backward(model_id, number, loss_fn="cross_entropy")
            await client.post("optim_step", model_id=model_id, seq_id=number + 1, adam_params={})
        first = await client.reply(
            await client.post("save_weights_for_sampler", model_id=model_id, seq_id=5, sampling_session_seq_id=0)
        )
        named = await client.reply(await client.post("save_weights_for_sampler", model_id=model_id, seq_id=6, path="a"))
        session_id = model_id.partition(":")[0]
        second = await client.post(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=1, model_path=named["path"]
        )
        assert client.swarm.asked == [("publish", ["model.safetensors"], 2)]
        for sampler_id in (first["sampling_session_id"], second["sampling_session_id"]):
            promise = await client.post(
                "asample",
                sampling_session_id=sampler_id,
                seq_id=0,
                num_samples=2,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [3]}, {"type": "encoded_text", "tokens": [4]}]},
                sampling_params={"max_tokens": 3, "stop": [6], "temperature": 0.5},
            )
            assert len(set(promise["sample_sequence_ids"])) == 2
            answer = message("SampleResponse")
            answer.ParseFromString(await client.reply(promise))
            tokens = [np.frombuffer(one.tokens, np.int32).tolist() for one in answer.sequences]
            assert tokens == [[5, 6], [5, 6]], "a sample ends with its stop token"
            assert [one.stop_reason for one in answer.sequences] == [0, 0]
            asked = ("sample", [3, 4], 2, {"max_tokens": 3, "temperature": 0.5, "version": 2})
            assert client.swarm.asked.pop() == asked


async def test_the_base_is_a_sampler_too(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        session_id = (await client.post("create_session"))["session_id"]
        asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": str(policy)}
        await client.post("create_sampling_session", **asked)
        asked |= {"sampling_session_seq_id": 1, "base_model": "tiny"}
        sampler_id = (await client.post("create_sampling_session", **asked))["sampling_session_id"]
        assert client.swarm.asked == [("publish", ["model.safetensors"], 1)]
        said = (await client.http.get(f"/api/v1/samplers/{sampler_id}")).json()
        assert said == {"sampler_id": sampler_id, "base_model": "tiny"}


async def test_in_a_round_of_adapters_an_adapter_of_its_rank_is_published(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path, adapter_rank=2) as client:
        model_id = await client.model()
        saved = await client.post("save_weights_for_sampler", model_id=model_id, seq_id=1, sampling_session_seq_id=0)
        assert (await client.reply(saved))["sampling_session_id"]
        assert client.swarm.asked == [("publish", ["adapter_model.safetensors"], 1)]
        session_id = model_id.partition(":")[0]
        asked = {"session_id": session_id, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
        assert "adapters of rank 2" in await client.refused("create_model", 400, **asked)


async def test_a_state_outlives_the_server_and_a_lost_model_is_named(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        model_id = await client.model()
        await client.forward_backward(model_id, 1, loss_fn="cross_entropy")
        await client.post("optim_step", model_id=model_id, seq_id=2, adam_params={})
        saved = await client.reply(await client.post("save_weights", model_id=model_id, seq_id=3, path="last"))
        again = await client.reply(await client.post("save_weights", model_id=model_id, seq_id=4, path="last"))
        assert "There is a state 'last'" in again["error"]
        assert again["category"] == "user"
    async with serving(policy, tmp_path) as client:
        assert "There is no model" in await client.refused(
            "optim_step", 404, model_id=model_id, seq_id=5, adam_params={}
        )
        session_id = (await client.post("create_session"))["session_id"]
        asked = {"session_id": session_id, "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        loaded = await client.reply(await client.post("load_weights", **asked))
        model = client.service.find_model(loaded["model_id"])
        assert (model.trained.steps, model.shape.rank) == (1, 2)
        asked |= {"path": "tinker://x/weights/../../etc", "model_seq_id": 1}
        assert "no path of this server" in await client.refused("load_weights", 400, **asked)
        asked |= {"path": "tinker://x/weights/none"}
        assert "no usable state" in await client.refused("load_weights", 404, **asked)


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "inflight": ("save_weights_for_sampler", {"kind": "inflight"}, "kind: this value is not offered"),
    "external": ("save_weights_external", {"path": "x"}, "save_weights_external is not offered"),
    "name": ("save_weights", {"path": "../x"}, "no path of this server"),
    "optimizer": ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "adam_params: Field"),
    "parameter": ("optim_step", {"adam_params": {"momentum": 1}}, "adam_params.momentum: Extra"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_a_refused_call_of_a_model_takes_its_place_in_the_line(policy: Path, tmp_path: Path, name: str) -> None:
    path, body, said = REFUSED[name]
    async with serving(policy, tmp_path) as client:
        model_id = await client.model()
        refusal = await client.reply(await client.post(path, model_id=model_id, seq_id=1, **body))
        assert said in refusal["error"]
        assert refusal["category"] == "user"
        await client.reply(await client.forward_backward(model_id, 2, loss_fn="cross_entropy"))
        wrong = await client.reply(await client.forward_backward(model_id, 3, loss_fn="gspo"))
        assert "gspo is not offered" in wrong["error"]
        step = await client.reply(await client.post("optim_step", model_id=model_id, seq_id=4, adam_params={}))
        assert "lacks a part" in step["error"]


SAMPLING: Mapping[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt_logprobs": True}, "prompt_logprobs: this value is not offered"),
    "alternatives": ({"topk_sample_logprobs": 3}, "topk_sample_logprobs: this value is not offered"),
    "stability": ({"record_stability_info": True}, "record_stability_info: this value is not offered"),
    "top_k": ({"sampling_params": {"top_k": 5}}, "sampling_params.top_k: this value is not offered"),
    "top_p": ({"sampling_params": {"top_p": 0.9}}, "sampling_params.top_p"),
    "no end": ({"sampling_params": {"stop": []}}, "sampling_params.stop is an empty list"),
    "image": ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks.0"),
    "new field": ({"speed": "fast"}, "speed: Extra"),
    "count": ({"num_samples": 0}, "num_samples"),
}


async def test_sampling_that_is_not_offered_is_refused_by_name(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        session_id = (await client.post("create_session"))["session_id"]
        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler_id = (await client.post("create_sampling_session", **sampler))["sampling_session_id"]
        whole: dict[str, Any] = {"sampling_session_id": sampler_id, "seq_id": 0, "sampling_params": {}}
        whole["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [3]}]}
        for body, said in SAMPLING.values():
            assert said in await client.refused("asample", 400, **{**whole, **body})
        lost = {**whole, "sampling_session_id": "x"}
        assert "There is no sampler" in await client.refused("asample", 404, **lost)
        client.swarm.fails_with = NotFound("No node holds swarm@2.")
        reply = await client.reply(await client.post("asample", **whole))
        assert reply == {"error": "No node holds swarm@2. (not_found)", "category": "user"}
        client.swarm.gate.clear()
        waiting = await client.post("asample", **{**whole, "seq_id": 1})
        await client.post("cancel_future", request_id=waiting["request_id"])
        assert "cancelled" in (await client.reply(waiting))["error"]


async def test_calls_without_the_key_and_unknown_calls_are_refused(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        for key in ("", "tml-es-2", "es-1"):
            answer = await client.http.post("/api/v1/create_session", json={}, headers={"X-API-Key": key})
            assert (answer.status_code, answer.json()["code"]) == (401, "key_refused")
        assert "weights_info is not offered: states belong" in await client.refused("weights_info", 400)
        assert "no call that this server knows" in await client.refused("guess", 400)
        assert "There is no request" in await client.refused("retrieve_future", 404, request_id="x")
        asked = {"session_id": "x", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        assert "There is no session" in await client.refused("create_model", 404, **asked)
        asked["base_model"] = "larger"
        assert "no model 'larger'" in await client.refused("create_model", 404, **asked)
        body = await client.http.post(
            "/api/v1/forward_backward", content=b"\xff", headers={"Content-Type": "application/x-protobuf"}
        )
        assert (body.status_code, body.json()["code"]) == (400, "malformed_message")


async def test_a_session_that_ends_takes_its_models_along(policy: Path, tmp_path: Path) -> None:
    async with serving(policy, tmp_path) as client:
        model_id = await client.model()
        waiting = await client.forward_backward(model_id, 2, loss_fn="cross_entropy")
        session_id = model_id.partition(":")[0]
        await client.post(f"sessions/{session_id}/finish", reason={"type": "success"})
        assert "The session has ended" in (await client.reply(waiting))["error"]
        assert "There is no model" in await client.refused("get_info", 404, model_id=model_id)
        assert "There is no session" in await client.refused("session_heartbeat", 404, session_id=session_id)


async def test_a_request_that_never_arrives_fails_those_that_wait_for_it_by_name() -> None:
    said = list[str]()
    line = RequestLine(gap_s=0.01)

    async def ran() -> None:
        said.append("ran")
        done.set()

    def request() -> NumberedRequest:
        return NumberedRequest(ran, lambda error: said.append(str(error)))

    done = asyncio.Event()
    task = asyncio.create_task(line.run())
    line.add(3, request())
    line.add(4, request())
    await done.wait()
    task.cancel()
    assert len(said) == 2
    assert "seq_id 1 has not arrived" in said[0]
    with pytest.raises(OutOfOrder, match="used before"):
        line.add(3, request())


async def test_replies_are_bounded_and_those_that_were_fetched_go_first() -> None:
    replies = Replies(pending_max=3, kept_max_bytes=10)
    for name in "abc":
        assert replies.begin(name)
    with pytest.raises(Overloaded):
        replies.begin("d")
    assert await replies.fetch("a", wait_s=0.001) is None
    for name in "ab":
        replies.finish(name, FinishedReply(name.encode() * 5))
    assert not replies.begin("a"), "a repeat"
    assert (await replies.fetch("b") or FinishedReply(b"")).body == b"bbbbb"
    replies.finish("c", FinishedReply(b"ccccc"))
    with pytest.raises(NotFound):
        await replies.fetch("b")
    assert (await replies.fetch("a") or FinishedReply(b"")).body == b"aaaaa"
