"""A client of S3-compatible object stores: two requests, signed with AWS Signature Version 4.

- `sign` is pure; it is the published algorithm for addresses without escapes, which the round's names never need.
- Buckets are addressed by path, which AWS and every compatible store understand.
- Endpoint, region and credentials come from the environment: never from a file or a command line.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import aiohttp

from protocol.errors import ConfigInvalid, Unreachable

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
