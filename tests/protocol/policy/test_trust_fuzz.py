"""The trust conversation against any bytes at all: refused by name, whatever the parsers below make of them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import (
    SwarmError,
)
from protocol.policy.manifest import target_path
from tests.protocol.tuf_repository import Repository, Seen, two_versions

DOCUMENTS = ["2.root.json", "timestamp.json", "4.snapshot.json", "4.targets.json", target_path(3)]


@pytest.fixture(scope="module")
def fed() -> Seen:
    """A node that would take one new document of every kind."""
    repository, stored = two_versions()
    repository.rotate("timestamp")
    repository.publish(3)
    assert repository.refresh(stored).documents.policy_version == 3
    return repository, stored


def served(fed: Seen, name: str, data: bytes) -> None:
    """Serve other bytes: refused by name, unless they mean the same."""
    repository = fed[0].documents | {name: data}
    liar = Repository.__new__(Repository)
    liar.documents = repository
    try:
        refreshed = liar.refresh(fed[1])
    except SwarmError:
        return
    assert refreshed.documents.policy_version == 3


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"signed": {}, "signatures": []}', id="hollow"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"signed":' * 50_000, id="deep maps"),
        pytest.param(b"1" * 10_000, id="long number"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(b'{"signed": NaN, "signatures": Infinity}', id="NaN"),
        pytest.param(b'"\\ud800"', id="surrogate"),
    ],
)
def test_hostile_documents_are_refused_by_name(fed: Seen, name: str, data: bytes) -> None:
    repository = Repository.__new__(Repository)
    repository.documents = fed[0].documents | {name: data}
    with pytest.raises(SwarmError):
        repository.refresh(fed[1])


@settings(max_examples=150)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_a_damaged_document_is_refused_by_name(fed: Seen, name: str, data: st.DataObject) -> None:
    damaged = bytearray(fed[0].documents[name])
    place = data.draw(st.integers(0, len(damaged)))
    damaged[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    served(fed, name, bytes(damaged))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@settings(max_examples=150)
@given(st.sampled_from(DOCUMENTS[:-1]), st.data())
def test_a_document_of_another_shape_is_refused_by_name(fed: Seen, name: str, data: st.DataObject) -> None:
    """The parser sees these bytes before any signature is checked."""
    document = json.loads(fed[0].documents[name])
    *way, last = data.draw(st.sampled_from(places(document)[1:]))
    inside = document
    for key in way:
        inside = inside[key]
    inside[last] = data.draw(anything)
    served(fed, name, json.dumps(document).encode())
