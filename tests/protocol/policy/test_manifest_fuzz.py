"""The manifest parser against any bytes at all: a sound manifest, or an error by name; never anything else.

- Whatever it accepts is safe to act on: bare file names, sizes that the chunks cover, bounded counts, one byte form.
"""

from collections import Counter
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import SwarmError
from protocol.policy.manifest import open_manifest
from protocol.wire import canonical
from tests.protocol.policy.test_manifest import FILE, GOOD, ROUND, C

SOUND = canonical.encode(GOOD)

leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=70) | st.binary(max_size=40)
    | st.sampled_from(["../x", "/etc/passwd", "a\0b", "C:\\x", ".ssh", "c" * 64, "", "con", "a/b"])
)  # fmt: skip
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
)


def fed(data: bytes) -> str:
    """Parse, and check all that a node relies on; why it was refused, if it was."""
    try:
        manifest = open_manifest(data, round_id=ROUND, version=3)
    except SwarmError as refused:
        return str(refused)
    assert manifest.to_bytes() == data
    assert 1 <= len(manifest.files) <= limits.MANIFEST_MAX_FILES
    assert 1 <= manifest.chunk_size_bytes <= limits.CHUNK_MAX_BYTES
    for entry in manifest.files:
        assert entry.path[0] not in ".-"
        assert len(entry.path) <= 120
        assert not set(entry.path) & set("/\\\0:~")
        assert 0 <= entry.size_bytes <= len(entry.chunks) * manifest.chunk_size_bytes
    assert all(1 <= size <= manifest.chunk_size_bytes for size in manifest.chunk_sizes().values())
    return ""


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


NAMES = st.sampled_from([letter * 64 for letter in "abcdef"])


@st.composite
def cut(draw: st.DrawFn) -> tuple[int, list[str]]:
    """A size at the edge of a chunk, and mostly as many names as it needs."""
    size = draw(st.sampled_from([1, C - 1, C, C + 1, 2 * C]))
    count = max(0, -(-size // C) + draw(st.sampled_from([0] * 12 + [-1, 1])))
    return size, draw(st.lists(NAMES, min_size=count, max_size=count))


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """A file with patches before and after an anchor, which nearly agree."""
    patches = []
    for _ in range(draw(st.integers(0, 2))):
        size, chunks = draw(cut())
        base = {"base_digest": draw(NAMES), "base_size_bytes": draw(st.sampled_from([1, C, 2 * C]))}
        patches.append({**base, "size_bytes": size, "chunks": chunks})
    after = draw(st.integers(0, len(patches)) | st.just(len(patches) + 1))
    size, chunks = draw(cut())
    if 0 < after <= len(patches):
        patches[-after]["base_size_bytes"], size = size, draw(st.sampled_from([1, C]))
    path, file_digest = draw(st.sampled_from(["model", "Model", "other"])), draw(NAMES)
    told = {"path": path, "digest": file_digest, "size_bytes": size, "chunks": chunks}
    return {**told, "patches": patches, "patches_after_anchor": after}


def test_a_manifest_that_nearly_agrees_with_itself() -> None:
    """Every field is sound by itself: what is judged is how they fit."""
    met: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(st.lists(entries(), min_size=1, max_size=2))
    @example([FILE])
    @example([FILE, FILE])
    @example([FILE | {"patches_after_anchor": 1}])
    @example([FILE | {"patches": [PATCH_TO_ITSELF]}])
    @example([FILE | {"chunks": []}])
    def judge(files: list[dict[str, Any]]) -> None:
        refused = fed(canonical.encode(GOOD | {"files": files}))
        met[next((word for word in WORDS if word in refused), refused)] += 1

    judge()
    assert set(met) == {*WORDS, ""}, f"refused for other reasons, or never that far: {met}"


WORDS = ("share a name", "anchor before", "comes back", "chunks")
"""A word of each reason; every reason has an example, since chance does not always reach it."""

PATCH_TO_ITSELF = {
    "base_digest": FILE["digest"], "base_size_bytes": 1, "size_bytes": 1, "chunks": FILE["chunks"],
}  # fmt: skip
