"""Signatures of requests to an object store: the published example, and what the environment says."""

from datetime import UTC, datetime

import pytest

from coordinator.config import load
from coordinator.publishing.mirror import Credentials, Target, sign, target
from protocol.errors import ConfigInvalid

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


def test_the_example_of_the_specification_has_its_signature() -> None:
    """Amazon S3 API Reference, "Signature Calculations for the Authorization Header", example GET Object."""
    place = Target("https://examplebucket.s3.amazonaws.com", "us-east-1", EXAMPLE)
    signed = sign(
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        {"Range": "bytes=0-9"},
        b"",
        place,
        datetime(2013, 5, 24, tzinfo=UTC),
    )
    assert signed["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def test_a_session_token_is_sent_and_signed() -> None:
    place = target("s3://bucket", KEYS | {"AWS_SESSION_TOKEN": "token"})
    signed = sign("PUT", "https://host/bucket/a", {}, b"x", place, datetime(2030, 1, 1, tzinfo=UTC))
    assert signed["x-amz-security-token"] == "token"
    assert "x-amz-security-token" in signed["authorization"]


@pytest.mark.parametrize(
    ("environment", "base"),
    [
        ({}, "https://s3.us-east-1.amazonaws.com/bucket/p"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/bucket/p"),
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000/bucket/p"),
        ({"AWS_ENDPOINT_URL": "http://x", "AWS_ENDPOINT_URL_S3": "http://y"}, "http://y/bucket/p"),
    ],
)
def test_the_environment_says_where_the_store_is(environment: dict[str, str], base: str) -> None:
    assert target("s3://bucket/p", KEYS | environment).base_url == base


@pytest.mark.parametrize("missing", list(KEYS))
def test_missing_credentials_are_named(missing: str) -> None:
    with pytest.raises(ConfigInvalid, match="AWS_ACCESS_KEY_ID"):
        target("s3://bucket", {name: value for name, value in KEYS.items() if name != missing})


def test_secrets_do_not_appear_when_printed() -> None:
    assert "secret" not in repr(target("s3://bucket", KEYS))


@pytest.mark.parametrize(
    "upload",
    ["bucket", "http://bucket", "s3://", "s3://B", "s3://b", "s3://bucket/", "s3://bucket/../x", "s3://bucket/a b",
     "s3://key:secret@bucket", "s3://bucket/%2e", "s3://bucket?x", "s3://bucket/a\n"],
)  # fmt: skip
def test_path_trick_in_the_upload_address_is_refused(upload: str) -> None:
    with pytest.raises(ConfigInvalid, match="upload"):
        load(None, [f"publish.upload={upload!r}"])


@pytest.mark.parametrize("upload", ["s3://bucket", "s3://my.bucket-1/rounds/a_b.c"])
def test_ordinary_places_are_allowed(upload: str) -> None:
    assert load(None, [f"publish.upload={upload}"]).publish.upload == upload
