"""Policy manifests: no surprise for a file system, no promise that contradicts itself, and only the one asked for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import MalformedMessage, ManifestInvalid, MessageTooLarge, SwarmError
from protocol.policy.chunks import chunk_id, digest, split
from protocol.policy.manifest import FileEntry, PolicyManifest, Sampler, open_manifest, target_path, version_of
from protocol.wire import canonical

ROUND = "a" * 64
C = 1024
"""Chunk size of these manifests."""

CHUNK = "c" * 64
FILE: dict[str, Any] = {
    "path": "model.safetensors",
    "size_bytes": 1,
    "digest": "d" * 64,
    "chunks": [CHUNK],
    "patches": [],
    "patches_after_anchor": 0,
}
GOOD: dict[str, Any] = {
    "round_id": ROUND,
    "version": 3,
    "update": 6,
    "parent": "e" * 64,
    "task": "arithmetic",
    "sampler": {"temperature": 1.0, "max_new_tokens": 8},
    "chunk_size_bytes": C,
    "files": [FILE],
}


def manifest(**change: Any) -> PolicyManifest:
    return PolicyManifest.from_bytes(canonical.encode(GOOD | change))


def test_the_good_example_is_good() -> None:
    assert manifest().to_bytes() == canonical.encode(GOOD)
    assert manifest(parent=None).parent is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../escape",
        "a/b",
        "/etc/passwd",
        "a\\b",
        "C:model",
        ".hidden",
        "-rf",
        "a b",
        "a\0b",
        "a\nb",
        "model.safetensors\n",
        "modéle",
        "a" * 121,
        "nul\u202efile",
        "%2e%2e",
        "~",
    ],
)
def test_a_file_name_that_leaves_its_folder_is_refused(path: str) -> None:
    with pytest.raises(MalformedMessage):
        manifest(files=[FILE | {"path": path}])


@pytest.mark.parametrize("path", ["model-00001-of-00002.safetensors", "config.json", "a..b", "_", "a" * 120])
def test_ordinary_names_are_allowed(path: str) -> None:
    assert manifest(files=[FILE | {"path": path}]).files[0].path == path


@pytest.mark.parametrize("names", [("a", "a"), ("Model.bin", "model.BIN")])
def test_two_files_of_one_name_are_refused_even_where_only_case_differs(names: tuple[str, str]) -> None:
    with pytest.raises(MalformedMessage, match="share a name"):
        manifest(files=[FILE | {"path": name} for name in names])


@pytest.mark.parametrize(
    ("size_bytes", "chunks"),
    [(0, 0), (1, 1), (C - 1, 1), (C, 1), (C + 1, 2), (2 * C, 2), (2 * C + 1, 3)],
)
def test_chunks_must_cover_the_size_exactly(size_bytes: int, chunks: int) -> None:
    manifest(files=[FILE | {"size_bytes": size_bytes, "chunks": [CHUNK] * chunks}])
    for wrong in {chunks - 1, chunks + 1} - {-1}:
        with pytest.raises(MalformedMessage, match="chunks"):
            manifest(files=[FILE | {"size_bytes": size_bytes, "chunks": [CHUNK] * wrong}])


def test_a_billion_chunks_are_refused_without_listing_them() -> None:
    header = canonical.encode(GOOD | {"files": [FILE | {"chunks": []}]})
    bomb = header.replace(b"\xa6chunks\x90", b"\xa6chunks\xdd" + (10**9).to_bytes(4))
    assert bomb != header
    with pytest.raises(MalformedMessage):
        PolicyManifest.from_bytes(bomb, max_bytes=limits.MANIFEST_MAX_BYTES)
    with pytest.raises(MalformedMessage, match="chunks"):
        manifest(files=[FILE | {"size_bytes": 10**9 * C, "chunks": [CHUNK]}])


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"version": limits.VERSION_MAX + 1},
        {"version": 2**64 - 1},
        {"version": "3"},
        {"update": -1},
        {"update": 2**63},
        {"parent": ""},
        {"parent": "E" * 64},
        {"round_id": "a" * 63},
        {"task": ""},
        {"chunk_size_bytes": 0},
        {"chunk_size_bytes": limits.CHUNK_MAX_BYTES + 1},
        {"files": []},
        {"files": [FILE | {"path": f"f{number}"} for number in range(limits.MANIFEST_MAX_FILES + 1)]},
        {"files": [FILE | {"size_bytes": -1, "chunks": []}]},
        {"files": [FILE | {"digest": "d" * 63}]},
        {"files": [FILE | {"chunks": ["c" * 65]}]},
        {"files": [FILE | {"chunks": ["../" + "c" * 61]}]},
        {"sampler": {"temperature": 0.0, "max_new_tokens": 8}},
        {"sampler": {"temperature": 1.0, "max_new_tokens": 0}},
        {"sampler": {"temperature": 1.0, "max_new_tokens": limits.TOKENS_MAX + 1}},
        {"sampler": {"temperature": 1.0, "max_new_tokens": 8, "top_p": 0.9}},
        {"expires": 1},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_field_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        manifest(**change)


def test_another_rounds_manifest_is_refused() -> None:
    data = canonical.encode(GOOD)
    assert open_manifest(data, round_id=ROUND, version=3) == manifest()
    with pytest.raises(ManifestInvalid):
        open_manifest(data, round_id="b" * 64, version=3)


def test_another_versions_manifest_is_refused() -> None:
    with pytest.raises(ManifestInvalid):
        open_manifest(canonical.encode(GOOD), round_id=ROUND, version=4)


def test_a_huge_manifest_is_refused_by_its_size() -> None:
    with pytest.raises(MessageTooLarge):
        open_manifest(bytes(limits.MANIFEST_MAX_BYTES + 1), round_id=ROUND, version=3)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.integers(1, 16))
def test_the_sizes_of_all_chunks_add_up_to_the_files(contents: list[bytes], chunk_size_bytes: int) -> None:
    files = tuple(
        FileEntry(
            path=f"f{number}",
            size_bytes=len(data),
            digest=digest(data),
            chunks=tuple(chunk_id(piece) for piece in split(data, chunk_size_bytes)),
        )
        for number, data in enumerate(contents)
    )
    made = PolicyManifest(
        round_id=ROUND,
        version=1,
        update=0,
        parent=None,
        task="t",
        sampler=Sampler(temperature=1.0, max_new_tokens=1),
        chunk_size_bytes=chunk_size_bytes,
        files=files,
    )
    pieces = {chunk_id(piece): len(piece) for data in contents for piece in split(data, chunk_size_bytes)}
    assert made.chunk_sizes() == pieces
    assert open_manifest(made.to_bytes(), round_id=ROUND, version=1) == made


@given(st.integers(1, limits.VERSION_MAX))
def test_a_target_path_names_its_version_and_sorts_like_it(version: int) -> None:
    assert version_of(target_path(version)) == version
    if version + 1 < 10**12:
        assert target_path(version) < target_path(version + 1)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "policy-1.manifest",
        "policy-0000000000001.manifest",
        "policy-+00000000001.manifest",
        "policy--00000000001.manifest",
        "policy-00000000000١.manifest",  # a digit, but not ours
        "policy-000000000001.manifest.manifest",
        "policy-policy-000000000001.manifest",
        "policy-000000000001",
        "000000000001.manifest",
        "policy-000_00000001.manifest",
        "folder/policy-000000000001.manifest",
        "policy-" + "9" * 5000 + ".manifest",
        "config.json",
    ],
)
def test_only_the_one_spelling_of_a_target_path_is_a_version(path: str) -> None:
    assert version_of(path) is None


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SwarmError):
        open_manifest(data, round_id=ROUND, version=1)


def patched(*sizes: int, after_anchor: int, digests: str = "0123456789") -> dict[str, Any]:
    """A file of 5 chunks whose patches have these sizes; file n of the chain has the digest n, n, n …"""
    patches = [
        {"base_digest": digests[n] * 64, "base_size_bytes": 5 * C, "size_bytes": size, "chunks": [f"{n}" * 63 + "a"]}
        for n, size in enumerate(sizes)
    ]
    anchor = [f"{n}" * 63 + "f" for n in range(5)]
    chain = {"patches": patches, "patches_after_anchor": after_anchor}
    return FILE | {"size_bytes": 5 * C, "digest": digests[len(sizes)] * 64, "chunks": anchor} | chain


def test_whoever_holds_nothing_fetches_the_anchor_and_the_patches_after_it() -> None:
    made = manifest(files=[patched(10, 20, 30, after_anchor=2)])
    assert made.files[0].anchor_digest == "1" * 64
    assert sorted(made.chunk_sizes_for(()).values()) == [20, 30, C, C, C, C, C]
    assert sorted(made.chunk_sizes().values()) == [10, 20, 30, C, C, C, C, C]


@pytest.mark.parametrize(
    ("held", "fetched"), [("0", [10, 20, 30]), ("1", [20, 30]), ("2", [30]), ("3", []), ("01", [20, 30]), ("02", [30])]
)
def test_whoever_holds_a_file_of_the_chain_fetches_the_patches_after_it(held: str, fetched: list[int]) -> None:
    made = manifest(files=[patched(10, 20, 30, after_anchor=1)])
    assert list(made.chunk_sizes_for({name * 64 for name in held}).values()) == fetched


def test_patches_that_come_to_more_than_the_file_are_not_fetched() -> None:
    made = manifest(files=[patched(C, C, after_anchor=0)]).files[0]
    assert made.route({"0" * 64}).held == "0" * 64
    dear = made.patches[1].model_copy(update={"size_bytes": 9 * C})
    large = made.model_copy(update={"patches": (made.patches[0], dear)})
    assert large.route({"0" * 64}).held is None


@pytest.mark.parametrize(
    "file",
    [
        patched(10, after_anchor=2),
        patched(10, after_anchor=-1),
        patched(C + 1, after_anchor=1),
        patched(0, after_anchor=1),
        patched(10, 10, 10, after_anchor=1, digests="0103"),
        patched(10, 10, after_anchor=1, digests="010"),
        patched(10, after_anchor=1) | {"chunks": []},
        patched(10, after_anchor=1) | {"size_bytes": C * (limits.MANIFEST_MAX_CHUNKS + 1)},
        patched(*[10] * 9, after_anchor=1) | {"patches": patched(*[10] * 9, after_anchor=1)["patches"] * 2},
        patched(10, after_anchor=1) | {"patches": [{"base_digest": "0" * 64}]},
    ],
)
def test_a_chain_that_contradicts_itself_is_refused(file: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        manifest(files=[file])


def test_a_chain_of_too_many_patches_is_refused() -> None:
    file = patched(*[10] * 9, after_anchor=0)
    patches = [file["patches"][0] | {"base_digest": f"{n:064x}"} for n in range(limits.PATCHES_MAX + 1)]
    assert len(manifest(files=[file | {"patches": patches[1:]}]).files[0].patches) == limits.PATCHES_MAX
    with pytest.raises(MalformedMessage, match="patches"):
        manifest(files=[file | {"patches": patches}])
