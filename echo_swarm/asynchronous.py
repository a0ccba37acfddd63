"""The client of the swarm for asyncio.

- Each prompt is a request of its own: one that a node answers late delays no other, and its version is exact.
- A version is sent as patches from the one that was sent before it, where the round still has that (`weights`).
- While the round has no room, or does not answer, a request is repeated, until `patience_s` is over.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from echo_swarm.rollouts import Budget, Rollout, Versions, read_budget, read_rollout, read_versions
from echo_swarm.weights import (
    LastSent,
    PublishedFile,
    files_to_send,
    in_published_form,
    read_published,
    size_of,
    write_patch,
)
from protocol.errors import (
    ERRORS,
    ConfigInvalid,
    FieldRefused,
    NotFound,
    Overloaded,
    PatchInvalid,
    SwarmError,
    Unreachable,
)

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat."""

CONNECTIONS = 256
"""Requests under way at once; others wait here."""

PATIENCE_S = 600.0

RETRY_S = 1.0
"""The wait before a request is repeated, if the answer does not say."""

LOOK_S = 0.25
"""Time between two questions who holds a version."""

PIECE_BYTES = 1 << 20


class AsyncSwarm:
    """A round of the swarm, for the holder of an API key."""

    def __init__(self, url: str, key: str, *, patience_s: float = PATIENCE_S, connections: int = CONNECTIONS) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigInvalid(f"{url} is not a URL.", hint=f"Write http://{url}, or https:// if the round has TLS.")
        self._patience_s = patience_s
        self._is_waiting = False
        """True once a wait was logged, until a request succeeds: many may wait at once."""
        self._free = asyncio.Semaphore(connections)
        self._publishing = asyncio.Lock()
        """Held by the version that is sent: the next one's patches start from it."""
        self._last_sent = LastSent()
        limits = httpx.Limits(max_connections=connections + 1, max_keepalive_connections=connections + 1)
        self._http = httpx.AsyncClient(
            base_url=url.partition("#")[0].rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}", "Accept": "application/json"},
            timeout=httpx.Timeout(patience_s, connect=10.0),
            limits=limits,
        )

    async def __aenter__(self) -> "AsyncSwarm":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, and delete the files that were sent last."""
        await self._http.aclose()
        self._last_sent.close()

    async def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        version: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        priority: int | None = None,
        max_price_micros_per_mtok: int | None = None,
    ) -> list[Rollout]:
        """Return `n` samples of each prompt, in the order of the prompts.

        With `version`, only that version answers; without, each prompt is answered by the version of its node, which is
        at most `Versions.max_staleness` updates behind the newest one. What is left out has the round's defaults.

        `priority` orders the waiting prompts of this key: the lowest is first, and the default is 0. Only nodes that
        ask at most `max_price_micros_per_mtok` answer.
        """
        if isinstance(prompts, str):
            raise FieldRefused("`prompts` is one text.", hint="Give a list of prompts: swarm.sample([prompt]).")
        model = "swarm" if version is None else f"swarm@{version}"
        shared: dict[str, Any] = {"model": model, "n": n, "return_token_ids": True}
        optional = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop": stop,
            "tools": tools,
            "priority": priority,
            "max_price_micros_per_mtok": max_price_micros_per_mtok,
        }
        shared |= {name: value for name, value in optional.items() if value not in (None, (), [])}
        tasks = [asyncio.create_task(self._sampled(shared, prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)  # a TaskGroup would wrap the error of a prompt in a group of errors
        finally:
            for task in tasks:
                task.cancel()

    async def publish(self, weights: Any, *, updates: int = 1, patch: bool = True) -> int:
        """Publish weights as the next version, and return its number.

        `weights` is a folder in hub format, an adapter's folder, a model with `save_pretrained`, or a state_dict.
        `updates` is the number of training steps since the version before: the staleness bound counts them. Weights
        that are those of the newest version change nothing.

        With `patch`, only what changed since the version that this client published before is sent; a copy of a version
        in the round's types is kept on this machine's disk for that. Without, the files are sent as they are.
        """
        until = time.monotonic() + self._patience_s
        with files_to_send(weights) as files:
            async with self._publishing:
                if not patch:
                    return await self._published(files, {}, updates, until)
                bases = read_published(await self._call("GET", "/v1/trainer/files"))
                folder = self._last_sent.make_folder()
                try:
                    made = await asyncio.to_thread(in_published_form, files, bases, folder)
                    version = await self._published(made, bases, updates, until)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                self._last_sent.replace(folder, made)
                return version

    async def versions(self) -> Versions:
        """Return the round's newest version, and which versions nodes hold."""
        return read_versions(await self._call("GET", "/v1/trainer/versions"))

    async def held(self, version: int, nodes: int = 1) -> None:
        """Wait until so many nodes hold a version, or newer ones."""
        until = time.monotonic() + self._patience_s
        while True:
            versions = await self.versions()
            if sum(count for number, count in versions.held.items() if number >= version) >= nodes:
                return
            if time.monotonic() > until:
                raise Unreachable(f"Fewer than {nodes} nodes hold version {version} after {self._patience_s:g} s.")
            await asyncio.sleep(LOOK_S)  # no event of the public API tells who holds a version

    async def budget(self) -> Budget:
        """Return the budget of the key, and what it has spent."""
        return read_budget(await self._call("GET", "/v1/key"))

    async def _published(
        self, files: Mapping[Path, str], bases: Mapping[str, PublishedFile], updates: int, until: float
    ) -> int:
        """Send files and request the version that they make; return its number."""
        offer = {"files": {path.name: digest for path, digest in files.items()}, "updates": updates}
        while True:
            sent_bytes = 0
            for path, digest in files.items():
                sent_bytes += await self._send(path, digest, bases.get(path.name))
            try:
                body = await self._call("POST", "/v1/trainer/versions", offer)
            except NotFound:  # the coordinator ended after it had received the files
                if time.monotonic() > until:
                    raise
            else:
                log.info("published version=%d sent_bytes=%d", body["version"], sent_bytes)
                return int(body["version"])

    async def _send(self, path: Path, digest: str, base: PublishedFile | None) -> int:
        """Send a file, as a patch if its base was sent last; return the number of bytes sent."""
        address = f"/v1/trainer/files/{digest}"
        if base is not None and (held := self._last_sent.file(base.digest)) is not None:
            patch = path.with_name(f".{path.name}.patch")
            try:
                if await asyncio.to_thread(write_patch, held, base.digest, path, patch):
                    await self._call("PUT", f"{address}?base={base.digest}", patch)
                    return size_of(patch)
            except (NotFound, PatchInvalid) as error:
                log.warning("sending the whole of %s: %s", path.name, error)
            finally:
                patch.unlink(missing_ok=True)
        await self._call("PUT", address, path)
        return size_of(path)

    async def _sampled(self, shared: Mapping[str, Any], prompt: Prompt) -> Rollout:
        """Return the samples of one prompt."""
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            text = prompt if isinstance(prompt, str) else list(prompt)
            address, body = "/v1/completions", {**shared, "prompt": text, "logprobs": 1}
        else:
            address, body = "/v1/chat/completions", {**shared, "messages": list(prompt), "logprobs": True}
        async with self._free:
            return read_rollout(await self._call("POST", address, body))

    async def _call(self, method: str, address: str, body: Mapping[str, Any] | Path | None = None) -> Any:
        """Send a request until it is answered, refused, or `patience_s` is over; return the JSON of the answer."""
        until = time.monotonic() + self._patience_s
        while True:
            retry_s = RETRY_S
            try:
                if isinstance(body, Path):
                    response = await self._http.request(method, address, content=_pieces(body))
                else:
                    response = await self._http.request(method, address, json=body)
                if response.is_success:
                    self._is_waiting = False
                    return response.json() if response.content else None
                error = _error(response)
                with suppress(ValueError):
                    retry_s = float(response.headers.get("Retry-After", ""))
            except httpx.TransportError as broken:
                error = Unreachable(f"The round does not answer ({str(broken) or type(broken).__name__}).")
            if not isinstance(error, Overloaded | Unreachable) or time.monotonic() + retry_s > until:
                raise error
            if not self._is_waiting:
                self._is_waiting = True
                log.warning("%s Asking again for up to %.0f s.", error.message, until - time.monotonic())
            await asyncio.sleep(retry_s)  # the answer says when to come again


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    """Yield a file in pieces, so that weights need not fit into memory twice."""
    with path.open("rb") as file:  # a local file: reading 1 MiB takes less time than a change of threads
        while piece := file.read(PIECE_BYTES):
            yield piece


def _error(response: httpx.Response) -> SwarmError:
    """Return the error of an answer, which has OpenAI's form or ours."""
    try:
        said = response.json()
    except ValueError:  # from a proxy or another server
        said = None
    if isinstance(said, dict):
        said = said.get("error", said)
        if isinstance(said, dict) and said.get("code") in ERRORS:
            return SwarmError.from_wire(said)
    if response.status_code >= 500:
        return Unreachable(f"The answer is HTTP {response.status_code}.")
    return NotFound(f"The answer is HTTP {response.status_code}, and not from a coordinator.", hint="Check the URL.")
