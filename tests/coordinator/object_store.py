"""An S3-compatible object store as a process of its own, which checks signatures as AWS does."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.processes.programs import free_address

ALL = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
READERS = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", '
    '"Resource": "arn:aws:s3:::weights/*"}]}'
)
BEFORE_CHECKS = 5
"""Requests that the store takes unchecked: those below that make the bucket and the user."""

BUCKET = "weights"


@dataclass(frozen=True)
class Store:
    """A running store, one bucket in it, and a key that may write there."""

    endpoint: str
    process: subprocess.Popen[bytes]
    key_id: str
    secret: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    def objects(self) -> dict[str, bytes]:
        """Return the objects in the bucket, as listed by another client."""
        client = _client("s3", self.endpoint, self.key_id, self.secret)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        names = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def open_to_readers(self) -> None:
        """Make the bucket readable by everybody, as an operator does once."""
        client = _client("s3", self.endpoint, self.key_id, self.secret)
        client.put_bucket_policy(Bucket=BUCKET, Policy=READERS)

    def caching(self, name: str) -> str:
        client = _client("s3", self.endpoint, self.key_id, self.secret)
        return str(client.head_object(Bucket=BUCKET, Key=name)["CacheControl"])


def _client(service: str, endpoint: str, key_id: str, secret: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="eu-central-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
    )


@contextmanager
def object_store(*, checks_readers: bool = True) -> Iterator[Store]:
    """A store with an empty bucket; without `checks_readers`, everybody may read and write."""
    port = int(free_address().rpartition(":")[2])
    environment = os.environ | ({"INITIAL_NO_AUTH_ACTION_COUNT": str(BEFORE_CHECKS)} if checks_readers else {})
    process = subprocess.Popen(
        [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        endpoint = f"http://127.0.0.1:{port}"
        iam = _client("iam", endpoint, "first", "first")
        iam.create_user(UserName="operator")
        iam.put_user_policy(UserName="operator", PolicyName="all", PolicyDocument=ALL)
        key = iam.create_access_key(UserName="operator")["AccessKey"]
        place = {"LocationConstraint": "eu-central-1"}
        s3 = _client("s3", endpoint, "first", "first")
        s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
        s3.list_buckets()
        yield Store(endpoint, process, key["AccessKeyId"], key["SecretAccessKey"])
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, "the object store did not start"
            threading.Event().wait(0.1)
        else:
            return
    raise AssertionError("the object store did not come up")
