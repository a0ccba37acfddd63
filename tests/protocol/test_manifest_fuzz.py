"""The manifest parser against any bytes at all: a sound manifest, or an error by name; never anything else.

- Whatever it accepts is safe to act on: bare file names, sizes that the chunks cover, bounded counts, one byte form.
"""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import canonical, limits
from protocol.errors import SwarmError
from protocol.manifest import open_manifest
from tests.protocol.test_manifest import FILE, GOOD, ROUND

SOUND = canonical.encode(GOOD)

leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=70) | st.binary(max_size=40)
    | st.sampled_from(["../x", "/etc/passwd", "a\0b", "C:\\x", ".ssh", "c" * 64, "", "con", "a/b"])
)  # fmt: skip
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
)


def fed(data: bytes) -> None:
    """Parse, and check all that a node relies on."""
    try:
        manifest = open_manifest(data, round_id=ROUND, version=3)
    except SwarmError:
        return
    assert manifest.to_bytes() == data
    assert 1 <= len(manifest.files) <= limits.MANIFEST_MAX_FILES
    assert 1 <= manifest.chunk_size_bytes <= limits.CHUNK_MAX_BYTES
    for entry in manifest.files:
        assert entry.path[0] not in ".-"
        assert len(entry.path) <= 120
        assert not set(entry.path) & set("/\\\0:~")
        assert 0 <= entry.size_bytes <= len(entry.chunks) * manifest.chunk_size_bytes
    assert all(1 <= size <= manifest.chunk_size_bytes for size in manifest.chunk_sizes().values())


@settings(max_examples=400)
@given(st.binary(max_size=600))
def test_any_bytes_at_all(data: bytes) -> None:
    fed(data)


@settings(max_examples=400)
@given(st.integers(0, len(SOUND)), st.integers(0, 8), st.binary(max_size=8))
def test_a_damaged_manifest(place: int, cut: int, put: bytes) -> None:
    fed(SOUND[:place] + put + SOUND[place + cut :])


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, inner in items for place in places(inner, (*way, key)))]


@settings(max_examples=300)
@given(st.sampled_from(places(GOOD)[1:]), anything)
@example(("files",), [FILE] * 300)
@example(("files", 0, "size_bytes"), 2**63)
@example(("files", 0, "chunks"), ["c" * 64] * 1000)
def test_a_manifest_of_another_shape(way: tuple[Any, ...], value: Any) -> None:
    """Sound encoding, every field in turn something else."""
    document = canonical.decode(SOUND)
    inside = document
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    try:
        data = canonical.encode(document)
    except SwarmError:
        return
    fed(data)


@settings(max_examples=200)
@given(st.sampled_from(sorted(GOOD)), st.sampled_from([0xDD, 0xDF, 0xC6, 0xDB]), st.integers(1, 2**32 - 1))
def test_a_length_that_promises_billions(field: str, header: int, count: int) -> None:
    """A value whose header claims more than there is: refused before anything is allocated for it."""
    name = canonical.encode(field)
    place = SOUND.index(name) + len(name)
    fed(SOUND[:place] + bytes([header]) + count.to_bytes(4) + SOUND[place:])
