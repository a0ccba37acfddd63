"""Sessions, models and samplers of Tinker clients, and what each call does with them.

- A model belongs to a session, and is dropped when the session ends or falls silent. Its saved states stay.
- One thread computes: models take turns. Sampling waits for nobody.
- A sampler is a version of the swarm: only that version answers. The version is published when the sampler is made,
  unless the newest version has these weights.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from echo_swarm.asynchronous import AsyncSwarm
from echo_swarm.tinker.calls import CreateModel, LoadWeights, OptimStep, SampleCall, SaveForSampler, SaveWeights
from echo_swarm.tinker.forms import ForwardBackward, write_output, write_samples
from echo_swarm.tinker.lora import LoraMatrices, LoraShape, SharedBase
from echo_swarm.tinker.replies import FinishedReply, NumberedRequest, Replies, RequestLine, failed_reply, json_reply
from echo_swarm.tinker.training import TinkerModel, read_about
from protocol import limits
from protocol.errors import FieldRefused, NotFound, OutOfOrder, Overloaded, SwarmError

T = TypeVar("T")

log = logging.getLogger(__name__)

STATES, SAMPLERS = "weights", "sampler_weights"

_PATH = re.compile(rf"tinker://([\w:.-]{{1,200}})/({STATES}|{SAMPLERS})/(.*)", re.ASCII)
_NAME = re.compile(rf"[A-Za-z0-9_-][\w.-]{{0,{limits.TINKER_NAME_MAX_CHARS - 1}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The policy that the round samples: its folder, its name for clients, and the form of the round's versions."""

    folder: Path
    name: str
    adapter_rank: int = 0
    """The rank of a round whose versions are adapters; 0: its versions are whole weights."""

    def require(self, base_model: str) -> None:
        """Refuse the name of another model."""
        if base_model != self.name and Path(base_model).absolute() != self.folder.absolute():
            raise NotFound(f"This server has no model {base_model[:80]!r}.", hint=f"It has {self.name!r}.")


@dataclass(slots=True)
class SessionModel:
    """A model of a session, with its line of requests."""

    model_id: str
    shape: LoraShape
    line: RequestLine
    trained: TinkerModel
    task: "asyncio.Task[None]"
    version: int | None = None
    """The version that has the weights of now."""
    published_steps: int = 0


@dataclass(slots=True)
class TinkerSession:
    """A client's session."""

    seen_s: float
    models: dict[str, SessionModel] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PinnedSampler:
    """A sampler: the version that answers, and the path that it was made from."""

    version: int
    model_path: str | None = None


class TinkerService:
    """Everything behind the routes."""

    def __init__(self, swarm: AsyncSwarm, base: SharedBase, policy: ServedPolicy, states: Path) -> None:
        self._swarm, self._base, self.policy, self._states = swarm, base, policy, states
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker")
        self._publishing = asyncio.Lock()
        self._base_version: int | None = None
        self._newest_version: int | None = None
        """The version that was published last; those of other models may be too old soon."""
        self.replies = Replies()
        self._sessions = dict[str, TinkerSession]()
        self._samplers = OrderedDict[str, PinnedSampler]()
        self._tasks = dict[str, asyncio.Task[None]]()
        """Requests that belong to no line: creations and samples."""

    def open_session(self) -> str:
        """Return the id of a new session."""
        self._end_silent()
        if len(self._sessions) >= limits.TINKER_SESSIONS_MAX:
            raise Overloaded(f"{limits.TINKER_SESSIONS_MAX} sessions are open.", hint="Close some of them.")
        session_id = secrets.token_hex(8)
        self._sessions[session_id] = TinkerSession(time.monotonic())
        return session_id

    def heartbeat(self, session_id: str) -> None:
        """Record that a session's client is alive."""
        self._session(session_id).seen_s = time.monotonic()

    def finish_session(self, session_id: str) -> None:
        """End a session, and drop its models."""
        session = self._sessions.pop(session_id, None)
        for model in session.models.values() if session else ():
            model.task.cancel()
            model.line.close(OutOfOrder("The session has ended."))

    async def close(self) -> None:
        """End everything."""
        for session_id in list(self._sessions):
            self.finish_session(session_id)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._thread.shutdown(wait=True)

    def find_model(self, model_id: str) -> SessionModel:
        """Return a model."""
        session_id = model_id.partition(":")[0]
        found = self._sessions[session_id].models.get(model_id) if session_id in self._sessions else None
        if found is None:
            raise NotFound(
                f"There is no model {model_id[:80]!r}.",
                hint="Its session has ended, or the server was restarted: create it anew, or from a saved state.",
            )
        return found

    def find_sampler(self, sampler_id: str) -> PinnedSampler:
        """Return a sampler."""
        if (found := self._samplers.get(sampler_id)) is None:
            raise NotFound(f"There is no sampler {sampler_id[:80]!r}.", hint="Save the weights for a sampler again.")
        return found

    def create_model(self, call: CreateModel) -> str:
        """Begin to create a model; return the id of the reply."""
        self.policy.require(call.base_model)
        config = call.lora_config
        seed = secrets.randbits(31) if config.seed is None else config.seed
        shape = LoraShape(config.rank, config.train_attn, config.train_mlp, seed)
        return self._begin_model(call.session_id, call.model_seq_id, shape)

    def load_weights(self, call: LoadWeights) -> str:
        """Begin to load a state, into a new model or an existing one; return the id of the reply."""
        if call.session_id is not None and call.model_seq_id is not None:
            if call.base_model is not None:
                self.policy.require(call.base_model)
            folder = self._folder(call.path)
            shape = read_about(folder)["shape"]
            return self._begin_model(call.session_id, call.model_seq_id, shape, folder, with_optimizer=call.optimizer)
        if call.model_id is None or call.seq_id is None:
            raise FieldRefused("load_weights needs session_id and model_seq_id, or model_id and seq_id.")
        model = self.find_model(call.model_id)

        async def load() -> FinishedReply:
            folder = self._folder(call.path)
            await self._compute(lambda: model.trained.load(folder, with_optimizer=call.optimizer))
            model.version = None
            return json_reply(type="load_weights", path=call.path, model_id=model.model_id)

        return self._in_line(model, call.seq_id, load)

    def forward_backward(self, call: ForwardBackward) -> str:
        """Line up a forward_backward; return the id of the reply."""
        model = self.find_model(call.model_id)

        async def compute() -> FinishedReply:
            logprobs, loss = await self._compute(lambda: model.trained.forward_backward(call))
            return FinishedReply(write_output(logprobs, loss), is_protobuf=True)

        return self._in_line(model, call.seq_id, compute)

    def optim_step(self, call: OptimStep) -> str:
        """Line up a step of the optimizer; return the id of the reply."""
        model = self.find_model(call.model_id)

        async def step() -> FinishedReply:
            metrics = await self._compute(lambda: model.trained.step(call.adam_params))
            model.version = None
            return json_reply(metrics=metrics)

        return self._in_line(model, call.seq_id, step)

    def refuse(self, model_id: str, number: int, error: SwarmError, *, clears_gradient: bool = False) -> str:
        """Line up a request that cannot be read, so that those after it run; return the id of the reply."""
        model = self.find_model(model_id)

        async def fail() -> FinishedReply:
            if clears_gradient:
                await self._compute(model.trained.clear)
            raise error

        return self._in_line(model, number, fail)

    def save_weights(self, call: SaveWeights) -> str:
        """Line up the saving of a state; return the id of the reply."""
        model = self.find_model(call.model_id)

        async def save() -> FinishedReply:
            path = f"tinker://{model.model_id}/{STATES}/{call.path}"
            folder = self._folder(path)
            if folder.exists() and not call.overwrite:
                raise FieldRefused(f"There is a state {call.path!r}.", hint="Give another name, or overwrite=True.")
            await self._compute(lambda: model.trained.save(folder))
            return json_reply(type="save_weights", path=path)

        return self._in_line(model, call.seq_id, save)

    def save_for_sampler(self, call: SaveForSampler) -> str:
        """Line up the publication of a model's weights; return the id of the reply."""
        model = self.find_model(call.model_id)

        async def publish() -> FinishedReply:
            path = None if call.path is None else f"tinker://{model.model_id}/{SAMPLERS}/{call.path}"
            file = None if path is None else self._folder(path)
            if model.version is None or model.version != self._newest_version:
                updates = max(1, model.trained.steps - model.published_steps)
                model.version = await self._publish(model.trained.matrices, updates)
                model.published_steps = model.trained.steps
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"version": model.version}))
                return json_reply(type="save_weights_for_sampler", path=path)
            session_id = model.model_id.partition(":")[0]
            sampler_id = self._add_sampler(session_id, call.sampling_session_seq_id or 0, model.version)
            return json_reply(type="save_weights_for_sampler", sampling_session_id=sampler_id)

        return self._in_line(model, call.seq_id, publish)

    async def create_sampler(self, session_id: str, number: int, model_path: str | None, base_model: str | None) -> str:
        """Return the id of a new sampler: of saved weights, or of the base."""
        self._session(session_id)
        if model_path is not None:
            file = self._folder(model_path)
            if file.parent.name != SAMPLERS:
                raise FieldRefused(
                    f"{model_path[:100]} is a state for training.",
                    hint="Sample from a path of save_weights_for_sampler.",
                )
            if not file.is_file():
                raise NotFound(f"There are no weights {model_path[:100]}.")
            return self._add_sampler(session_id, number, int(json.loads(file.read_text())["version"]), model_path)
        self.policy.require(base_model or "")
        if self._base_version is None:
            rank = self.policy.adapter_rank or 1
            self._base_version = await self._publish(LoraMatrices(LoraShape(rank), self._base.layers), 1)
        return self._add_sampler(session_id, number, self._base_version)

    def sample(self, call: SampleCall) -> str:
        """Begin to sample; return the id of the reply."""
        sampler = self.find_sampler(call.sampling_session_id)
        request_id = f"{call.sampling_session_id}:{call.seq_id}"

        async def sample() -> FinishedReply:
            params = call.sampling_params
            (rollout,) = await self._swarm.sample(
                [call.prompt_tokens()],
                call.num_samples,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                seed=params.seed,
                stop=params.stop_texts(),
                version=sampler.version,
            )
            ends = params.stop_tokens()
            return FinishedReply(
                write_samples(
                    [_cut(one.token_ids, one.logprobs, one.finish_reason == "stop", ends) for one in rollout.samples]
                ),
                is_protobuf=True,
            )

        self._begin_task(request_id, sample)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Cancel a sample that nobody waits for."""
        if (task := self._tasks.get(request_id)) is not None and ":sample:" in request_id:
            task.cancel()

    def _begin_model(
        self, session_id: str, number: int, shape: LoraShape, state: Path | None = None, *, with_optimizer: bool = False
    ) -> str:
        session = self._session(session_id)
        model_id = f"{session_id}:train:{number}"
        if (wanted := self.policy.adapter_rank) and shape.rank != wanted:
            raise FieldRefused(f"The round's versions are adapters of rank {wanted}.", hint=f"Use rank={wanted}.")

        async def create() -> FinishedReply:
            self._end_silent()
            if sum(len(one.models) for one in self._sessions.values()) >= limits.TINKER_MODELS_MAX:
                raise OutOfOrder(
                    f"{limits.TINKER_MODELS_MAX} models are in training.",
                    hint="Close the ServiceClient of one of them.",
                )
            trained = await self._compute(lambda: TinkerModel(self._base, shape))
            if state is not None:
                await self._compute(lambda: trained.load(state, with_optimizer=with_optimizer))
            self._session(session_id)  # it may have ended meanwhile
            line = RequestLine()
            task = asyncio.create_task(line.run())
            session.models[model_id] = SessionModel(model_id, shape, line, trained, task, published_steps=trained.steps)
            log.info("model %s: rank %d", model_id, shape.rank)
            return json_reply(type="create_model" if state is None else "load_weights", model_id=model_id)

        request_id = f"{model_id}:0"
        self._begin_task(request_id, create)
        return request_id

    def _in_line(self, model: SessionModel, number: int, work: Callable[[], Awaitable[FinishedReply]]) -> str:
        """Line up a request of a model; return the id of its reply."""
        request_id = f"{model.model_id}:{number}"
        if self.replies.begin(request_id):

            def fail(error: SwarmError) -> None:
                model.trained.discard()
                self.replies.finish(request_id, failed_reply(error))

            try:
                model.line.add(number, NumberedRequest(lambda: self._answer(request_id, work), fail))
            except SwarmError as error:
                self.replies.finish(request_id, failed_reply(error))
        return request_id

    def _begin_task(self, request_id: str, work: Callable[[], Awaitable[FinishedReply]]) -> None:
        """Run a request that waits for no other."""
        if self.replies.begin(request_id):
            task = asyncio.create_task(self._answer(request_id, work))
            self._tasks[request_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _answer(self, request_id: str, work: Callable[[], Awaitable[FinishedReply]]) -> None:
        """Record the reply that `work` returns, or its error."""
        try:
            reply = await work()
        except SwarmError as error:
            reply = failed_reply(error)
        except asyncio.CancelledError:
            self.replies.finish(request_id, failed_reply(OutOfOrder("The request was cancelled.")))
            raise
        except Exception:  # a fault of ours, or memory that is full: the client must hear of it, and others go on
            log.exception("request %s failed", request_id)
            reply = failed_reply(SwarmError("The server failed.", hint="Its log has the reason."))
        self.replies.finish(request_id, reply)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _publish(self, matrices: LoraMatrices, updates: int) -> int:
        """Publish weights, and return their version."""
        as_adapter = bool(self.policy.adapter_rank)
        with TemporaryDirectory(prefix="echo-swarm-tinker-") as scratch:
            folder = Path(scratch) / "version"
            write = self._base.write_adapter if as_adapter else self._base.write_merged
            await self._compute(lambda: write(matrices, folder))
            async with self._publishing:
                self._newest_version = await self._swarm.publish(folder, updates=updates)
                return self._newest_version

    def _folder(self, path: str) -> Path:
        """Return the place of a saved state, or of the version of a sampler."""
        if (match := _PATH.fullmatch(path)) is None or not _NAME.fullmatch(match[3]):
            raise FieldRefused(
                f"{path[:120]!r} is no path of this server.",
                hint="Names have letters, digits, '.', '_' and '-'; paths are those that a save returned.",
            )
        return self._states / match[1].replace(":", ".") / match[2] / match[3]

    def _add_sampler(self, session_id: str, number: int, version: int, model_path: str | None = None) -> str:
        sampler_id = f"{session_id}:sample:{number}"
        self._samplers[sampler_id] = PinnedSampler(version, model_path)
        while len(self._samplers) > limits.TINKER_SAMPLERS_MAX:
            self._samplers.popitem(last=False)
        return sampler_id

    def _session(self, session_id: str) -> TinkerSession:
        if (found := self._sessions.get(session_id)) is None:
            raise NotFound(
                f"There is no session {session_id[:80]!r}.", hint="It has ended: create a ServiceClient anew."
            )
        return found

    def _end_silent(self) -> None:
        """End the sessions whose clients are gone."""
        silent_since_s = time.monotonic() - limits.TINKER_SILENT_S
        for session_id in [name for name, one in self._sessions.items() if one.seen_s < silent_since_s]:
            log.info("session %s: no heartbeat", session_id)
            self.finish_session(session_id)


def _cut(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], ended: bool, ends: frozenset[int]
) -> tuple[tuple[int, ...], tuple[float, ...], bool]:
    """Return a sample up to and including the first of its stop tokens."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], logprobs[: place + 1], True
    return tokens, logprobs, ended
