"""The round's public files for mirrors: a folder, and a copy of it in an object store.

- `public/metadata` and `public/chunks` are links to the real folders, and to no other file of the round: `public` can
  be the root of a static server, or the source of `rsync -L`.
- A copy never has metadata whose files are missing: the timestamp is read first and uploaded last, after all files that
  existed when it was read.
- The announcement of a version waits for its upload, for a limited time, and not at all while the store is down; the
  upload is retried without end.
- Only documents that the timestamp refers to are uploaded: after a crash, others are signed again under the same name.
- Chunks that the round has deleted are deleted from the store, after the upload of the timestamp that no longer needs
  them.
- The list of uploaded files is kept on the disk; if it is lost, all files are uploaded again.

The store speaks S3: two requests, signed with AWS Signature Version 4.

- `sign` is pure; it is the published algorithm for addresses without escapes, which the round's names never need.
- Buckets are addressed by path, which AWS and every compatible store understand.
- Endpoint, region and credentials come from the environment: never from a file or a command line.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from tuf.api.metadata import Metadata, Snapshot, Targets, Timestamp

from coordinator.base.files import make_folder, write_durably
from protocol.errors import ConfigInvalid, Unreachable
from protocol.limits import retry_pause_s
from protocol.policy.origin import document_path

PATIENCE = aiohttp.ClientTimeout(total=60.0, sock_connect=10.0)
"""The time limit of one request: 4 MiB in 60 s is the slowest upload worth waiting for."""


@dataclass(frozen=True)
class Credentials:
    """The signer of requests; its `repr` does not show the secrets."""

    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Target:
    """A place in a bucket, and the credentials to write there."""

    base_url: str
    region: str
    credentials: Credentials


def target(upload: str, environment: Mapping[str, str] = os.environ) -> Target:
    """Return the place of `s3://bucket/prefix` by the variables of `environment`."""
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    endpoint = (endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
    key_id, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        raise ConfigInvalid(
            f"publish.upload is {upload}, but there are no credentials.",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a store that is not AWS.",
        )
    credentials = Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN", ""))
    return Target(f"{endpoint}/{upload.removeprefix('s3://')}", region, credentials)


def sign(
    method: str, url: str, headers: Mapping[str, str], body: bytes, place: Target, now: datetime
) -> dict[str, str]:
    """Return the headers of a signed request: the given ones, and those of the signature."""
    parts, moment = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    token = {"x-amz-security-token": place.credentials.token} if place.credentials.token else {}
    signed = {name.lower(): value for name, value in headers.items()}
    signed |= {"host": parts.netloc, "x-amz-date": moment, "x-amz-content-sha256": digest} | token
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
    request = "\n".join([method, parts.path, parts.query, lines, names, digest])
    scope = f"{moment[:8]}/{place.region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{place.credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    del signed["host"]
    return signed | {
        "authorization": f"AWS4-HMAC-SHA256 Credential={place.credentials.key_id}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    }


class Bucket:
    """A client that puts and deletes files below one place of a bucket."""

    def __init__(self, place: Target, session: aiohttp.ClientSession) -> None:
        self._place = place
        self._session = session

    async def put(self, name: str, data: bytes, caching: str) -> None:
        headers = {"Cache-Control": caching, "Content-Type": "application/octet-stream"}
        await self._send("PUT", name, data, headers)

    async def delete(self, name: str) -> None:
        await self._send("DELETE", name, b"", {})

    async def _send(self, method: str, name: str, data: bytes, headers: Mapping[str, str]) -> None:
        url = f"{self._place.base_url}/{name}"
        signed = sign(method, url, headers, data, self._place, datetime.now(UTC))
        try:
            async with self._session.request(
                method, url, data=data, headers=signed, timeout=PATIENCE, allow_redirects=False
            ) as response:
                said = (await response.content.read(1000)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(
                f"The upload of {name} to the object store failed: {type(error).__name__}: {error}"
            ) from error
        if response.status // 100 != 2:
            raise Unreachable(
                f"The object store refused {name} with status {response.status}: {said}",
                hint="Check bucket, region, credentials and this machine's clock.",
            )


log = logging.getLogger(__name__)

IMMUTABLE = "public, max-age=31536000, immutable"
FRESH = "no-cache"

AT_ONCE = 4
"""The number of parallel uploads; each holds one chunk in memory."""

PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""The pauses after failed passes; the last is repeated."""

TIMESTAMP = document_path("timestamp.json")
CHUNKS = "chunks/"


def make_public(folder: Path) -> Path:
    """Return the public folder, which is created if it is missing."""
    public = make_folder(folder / "public", public=True)
    for name, real in (("metadata", "metadata"), ("chunks", "blobs")):
        make_folder(folder / real, public=True)
        with suppress(FileExistsError):
            (public / name).symlink_to(Path("..") / real)
    return public


def open_mirror(upload: str, folder: Path) -> "Mirror | None":
    """Create the public folder, and return its mirror if the operator set one."""
    public = make_public(folder)
    return Mirror(public, target(upload), folder / "uploaded.json") if upload else None


class Mirror:
    """A copy of the public folder in an object store."""

    def __init__(self, public: Path, place: Target, memory: Path, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._public = public
        self._place = place
        self._memory = memory
        self._pauses_s = pauses_s
        self._there = _remembered(memory, place.base_url)
        self._state = asyncio.Condition()
        self._failing = False
        self._wanted = 1  # a store may lack files of an earlier run
        self._done = 0

    async def changed(self) -> int:
        """Record a change of the folder; return its number."""
        async with self._state:
            self._wanted += 1
            self._state.notify_all()
            return self._wanted

    async def caught_up(self, patience_s: float) -> bool:
        """Return True if all current files of the folder were uploaded within `patience_s` seconds."""
        news = await self.changed()
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self._failing else patience_s), self._state:
                await self._state.wait_for(lambda: self._done >= news)
                return True
        log.warning(
            "announcing a version before its upload is complete; until then nodes download it from the coordinator"
        )
        return False

    async def run(self) -> None:
        """Copy every change of the folder, without end."""
        failures = 0
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            bucket = Bucket(self._place, session)
            while True:
                async with self._state:
                    await self._state.wait_for(lambda: self._done < self._wanted)
                    news = self._wanted
                try:
                    await self._copy(bucket)
                except Exception as error:  # an error of a copy must not end the coordinator
                    if not failures:
                        log.error("upload failed, retrying: %s", error)
                    self._failing = True
                    await asyncio.sleep(retry_pause_s(failures, self._pauses_s))
                    failures += 1
                    continue
                if failures:
                    log.info("uploads succeed again")
                failures, self._failing = 0, False
                async with self._state:
                    self._done = news
                    self._state.notify_all()

    async def _copy(self, bucket: Bucket) -> None:
        """Run one pass: (1) read the timestamp, (2) upload new files, (3) upload the timestamp, (4) delete old ones."""
        timestamp = await asyncio.to_thread((self._public / TIMESTAMP).read_bytes)
        names = await asyncio.to_thread(self._names, timestamp)
        new = [name for name in names if name not in self._there]
        before = set(self._there)
        try:
            for start in range(0, len(new), AT_ONCE):
                puts = [self._put(bucket, name) for name in new[start : start + AT_ONCE]]
                for failure in await asyncio.gather(*puts, return_exceptions=True):
                    if failure is not None:
                        raise failure
            await bucket.put(TIMESTAMP, timestamp, FRESH)
            for name in sorted(name for name in self._there - set(names) if name.startswith(CHUNKS)):
                await bucket.delete(name)
                self._there.discard(name)
        finally:
            if self._there != before:
                await asyncio.to_thread(self._remember)

    async def _put(self, bucket: Bucket, name: str) -> None:
        try:
            data = await asyncio.to_thread((self._public / name).read_bytes)
        except FileNotFoundError:  # deleted since it was listed, as it is too old
            return
        await bucket.put(name, data, IMMUTABLE)
        self._there.add(name)

    def _names(self, timestamp: bytes) -> list[str]:
        """Return all chunks, and the documents that clients of this timestamp request; others may still change."""
        chunks = [path.relative_to(self._public).as_posix() for path in self._public.glob("chunks/??/*")]
        roots = [path.name for path in self._public.glob("metadata/*.root.json")]
        snapshot = f"{Metadata[Timestamp].from_bytes(timestamp).signed.snapshot_meta.version}.snapshot.json"
        meta = Metadata[Snapshot].from_bytes(self._read(snapshot)).signed.meta["targets.json"]
        targets = f"{meta.version}.targets.json"
        listed = Metadata[Targets].from_bytes(self._read(targets)).signed.targets
        documents = [name for name in (*roots, snapshot, targets, *listed) if not name.startswith(".")]
        return [*sorted(name for name in chunks if "/." not in name), *map(document_path, documents)]

    def _read(self, document: str) -> bytes:
        return (self._public / document_path(document)).read_bytes()

    def _remember(self) -> None:
        content = {"place": self._place.base_url, "names": sorted(self._there)}
        write_durably(self._memory, json.dumps(content).encode())


def _remembered(memory: Path, place: str) -> set[str]:
    """Return the names that an earlier run uploaded to this place."""
    try:
        content = json.loads(memory.read_bytes())
    except (FileNotFoundError, ValueError):
        return set()
    return set(content["names"]) if content["place"] == place else set()
