"""Versions that are refused by their manifest alone."""

import pytest

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.policy.folder import kind_of, require_files
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest, Sampler

CHUNK = limits.MIB

PUBLISHED = """
    config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json merges.txt tokenizer.model chat_template.jinja canary.json preprocessor_config.json vocab.txt
    model.safetensors model-00001-of-00004.safetensors model.safetensors.index.json adapter_config.json
    adapter_model.safetensors
"""


def entry(path: str, size_bytes: int, *, distinct: int = 1, patches: tuple[Patch, ...] = ()) -> FileEntry:
    count = -(-size_bytes // CHUNK)
    names = tuple(f"{number % distinct:064x}" for number in range(count))
    return FileEntry(path=path, size_bytes=size_bytes, digest="d" * 64, chunks=names, patches=patches)


def version(*files: FileEntry) -> PolicyManifest:
    return PolicyManifest(
        round_id="0" * 64,
        version=7,
        update=7,
        parent=None,
        task="arithmetic",
        sampler=Sampler(temperature=1.0, max_new_tokens=4),
        chunk_size_bytes=CHUNK,
        files=files,
    )


def test_every_file_that_published_policies_have_is_known() -> None:
    require_files(version(*(entry(name, CHUNK) for name in PUBLISHED.split())))


@pytest.mark.parametrize(
    "name",
    ["filler.bin", "model.py", "pytorch_model.bin", "README", "config.json.exe", "data.json", "x.txt", "a.jinja"],
)
def test_a_file_of_no_known_use_is_refused_by_its_name(name: str) -> None:
    assert kind_of(name) is None
    with pytest.raises(ManifestInvalid, match=f"Version 7 has a file {name}, which no engine reads"):
        require_files(version(entry("config.json", 10), entry(name, 10)))


@pytest.mark.parametrize(
    ("name", "max_bytes"),
    [
        ("config.json", limits.POLICY_CONFIG_MAX_BYTES),
        ("chat_template.jinja", limits.CHAT_TEMPLATE_MAX_BYTES),
        ("tokenizer.json", limits.TOKENIZER_MAX_BYTES),
        ("model.safetensors.index.json", limits.TENSOR_INDEX_MAX_BYTES),
    ],
)
def test_a_file_that_is_too_large_for_its_use_is_refused(name: str, max_bytes: int) -> None:
    require_files(version(entry(name, max_bytes, distinct=1000)))
    with pytest.raises(ManifestInvalid, match=f"a {name} of {max_bytes + 1} bytes; {max_bytes} are allowed"):
        require_files(version(entry(name, max_bytes + 1, distinct=1000)))


def test_a_gigabyte_of_a_repeated_chunk_is_refused() -> None:
    require_files(version(entry("model.safetensors", limits.REPEATED_MIN_BYTES)))
    require_files(version(entry("model.safetensors", 1024 * CHUNK, distinct=256)))
    with pytest.raises(ManifestInvalid, match="has 1073741824 bytes of files but only 1048576 bytes"):
        require_files(version(entry("model.safetensors", 1024 * CHUNK)))


def test_many_files_of_one_chunk_are_one_large_file() -> None:
    files = (entry(f"model-{number:05}.safetensors", 32 * CHUNK) for number in range(16))
    with pytest.raises(ManifestInvalid, match="of distinct chunks"):
        require_files(version(*files))


def test_a_patch_that_unfolds_is_refused() -> None:
    """A patch of a few bytes may make a file of zeros of any size."""
    patch = Patch(base_digest="b" * 64, base_size_bytes=10, size_bytes=10, chunks=("c" * 64,))
    grown = FileEntry(
        path="model.safetensors",
        size_bytes=2**30,
        digest="d" * 64,
        chunks=("a" * 64,),
        patches=(patch,),
        patches_after_anchor=1,
    )
    with pytest.raises(ManifestInvalid, match="has 1073741824 bytes of files"):
        require_files(version(grown))
    with pytest.raises(ManifestInvalid, match=r"patches config\.json"):
        require_files(version(grown.model_copy(update={"path": "config.json", "size_bytes": 10})))
