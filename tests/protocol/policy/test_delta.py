"""Patches of tensor files: exact for any bits, small for small changes, and a named error for anything else."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import PatchInvalid
from protocol.policy import delta
from protocol.policy.chunks import digest
from protocol.policy.tensors import header_of, layout
from tests.protocol.policy.patch_reader import patched
from tests.safetensors_files import file_of, next_file, nudged, policy_file, raw_file, weights

BASE = policy_file()
NEW = next_file(BASE)
HEAD_BYTES = 64


def encoded(base: bytes, new: bytes) -> bytes:
    return b"".join(delta.encode(base, new, base_digest=digest(base)))


def applied(base: bytes, patch: bytes) -> bytes:
    return b"".join(delta.apply(base, patch, base_digest=digest(base)))


PATCH = encoded(BASE, NEW)

DTYPES = st.sampled_from(["BF16", "F16", "F32", "F64", "I64", "U8", "BOOL", "F8_E4M3", "C64", "FROM_THE_FUTURE"])
WIDTH = 8


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[str, bytes]]:
    names = draw(st.lists(st.text(max_size=3).filter(lambda name: name != "__metadata__"), max_size=4, unique=True))
    return {name: (draw(DTYPES), draw(st.binary(max_size=6)) * WIDTH) for name in names}


@st.composite
def relatives(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file and one after it: tensors changed a little, retyped, resized, gone, new, and in another order."""
    old, new = draw(tensors()), draw(tensors())
    rng = Random(draw(st.integers(0, 2**32)))
    for name in draw(st.sets(st.sampled_from(sorted(old)))) if old else ():
        new[name] = (old[name][0], nudged(old[name][1], share=draw(st.sampled_from([0.0, 0.1, 1.0])), rng=rng))
    metadata = draw(st.none() | st.just({"format": "pt"}))
    return file_of(old), file_of(new, metadata=metadata, header_order=draw(st.sampled_from([1, -1])))


@given(relatives())
def test_a_patch_makes_the_new_file_bit_for_bit(pair: tuple[bytes, bytes]) -> None:
    base, new = pair
    assert applied(base, encoded(base, new)) == new
    assert patched(base, encoded(base, new)) == new, "a reader that was written from the docstring"


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 0.3, 1.0])
def test_any_density_of_change_is_exact(dtype: str, share: float) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    width = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}[dtype]
    before = rng.integers(0, 256, 8 * 3000, np.uint8)
    after = before.copy()
    changed = rng.random(len(before) // width) < share
    after.reshape(-1, width)[changed] = rng.integers(0, 256, (int(changed.sum()), width), np.uint8)
    base, new = file_of({"t": (dtype, before.tobytes())}), file_of({"t": (dtype, after.tobytes())})
    assert applied(base, encoded(base, new)) == new


def test_every_bf16_can_become_every_other_kind_of_bf16() -> None:
    """Zeros of both signs, infinities, NaNs with their payloads, subnormal numbers: bits are bits."""
    every = np.arange(2**16, dtype="<u2")
    special = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0001, 0x8001, 0x3F80], "<u2")
    base = file_of({"t": ("BF16", np.repeat(every, len(special)).tobytes())})
    new = file_of({"t": ("BF16", np.tile(special, len(every)).tobytes())})
    assert applied(base, encoded(base, new)) == new
    assert applied(new, encoded(new, base)) == base


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 5000])
def test_changes_at_any_distance_find_their_place(gap: int) -> None:
    before = np.zeros(20_000, "<u2")
    after = before.copy()
    after[[gap, 2 * gap + 1, 2 * gap + 2]] = 1, 0x8000, 0xFFFF
    base, new = file_of({"t": ("BF16", before.tobytes())}), file_of({"t": ("BF16", after.tobytes())})
    assert applied(base, encoded(base, new)) == new


B = limits.PATCH_BLOCK_BYTES


@pytest.mark.parametrize("size_bytes", [0, 8, B - 8, B, B + 8, 3 * B + 16])
def test_a_tensor_of_any_number_of_blocks_is_exact(size_bytes: int) -> None:
    """Nothing, one element, just under, exactly, just over one block, and several."""
    before = np.zeros(size_bytes // 2, "<u2")
    after = before.copy()
    after[::97] = 5
    after[-1:] = 7
    base, new = file_of({"t": ("BF16", before.tobytes())}), file_of({"t": ("BF16", after.tobytes())})
    assert applied(base, encoded(base, new)) == new


def test_a_reader_written_from_the_docstring_finds_far_changes_in_every_block() -> None:
    before = np.zeros(5 * B // 2 + 4, "<u2")
    after = before.copy()
    after[::1013] = 3
    after[5] = 0xFFFF
    base, new = file_of({"t": ("BF16", before.tobytes())}), file_of({"t": ("BF16", after.tobytes())})
    assert patched(base, encoded(base, new)) == new


def test_threads_make_the_same_patch_and_the_same_file() -> None:
    before = np.zeros(5 * B // 2 + 4, "<u2")
    after = before.copy()
    after[::1013] = 3
    base, new = file_of({"t": ("BF16", before.tobytes())}), file_of({"t": ("BF16", after.tobytes())})
    with ThreadPoolExecutor(3) as threads:
        patch = b"".join(delta.encode(base, new, base_digest=digest(base), each=threads.map))
        assert patch == encoded(base, new)
        assert b"".join(delta.apply(base, patch, base_digest=digest(base), each=threads.map)) == new


def test_one_change_in_a_hundred_is_a_patch_of_one_hundredth() -> None:
    """Positions cost about a byte, a step of one unit about a bit."""
    base = file_of({"t": ("BF16", weights(1, 200_000))})
    assert len(encoded(base, next_file(base))) < len(base) / 100


def test_no_change_costs_a_few_bytes_for_each_tensor() -> None:
    patch = encoded(BASE, BASE)
    assert applied(BASE, patch) == BASE
    assert len(patch) == HEAD_BYTES + 2 * (4 + 32)


def test_a_new_vanished_resized_or_retyped_tensor_is_no_obstacle() -> None:
    base = file_of(
        {"gone": ("BF16", weights(1, 50)), "grown": ("BF16", weights(2, 50)), "typed": ("BF16", weights(3, 52))}
    )
    new = file_of({"typed": ("F32", weights(4, 52)), "new": ("F16", weights(5, 9)), "grown": ("BF16", weights(2, 60))})
    assert applied(base, encoded(base, new)) == new


def test_a_header_that_only_changed_its_order_or_metadata_is_reproduced() -> None:
    content = {"a": ("BF16", weights(1, 50)), "b": ("BF16", weights(2, 60))}
    for new in (file_of(content, header_order=-1), file_of(content, metadata={"format": "pt"})):
        assert applied(file_of(content), encoded(file_of(content), new)) == new


def test_the_same_change_has_the_same_patch() -> None:
    assert encoded(bytes(BASE), bytes(NEW)) == PATCH


def test_a_patch_for_another_base_is_refused() -> None:
    """Mix and match: a base of the same shape, whose elements would take the changes without complaint."""
    other = policy_file(seed=7)
    with pytest.raises(PatchInvalid, match="made for the base"):
        applied(other, PATCH)


def test_a_base_that_lies_about_its_digest_is_caught_by_the_tensors_own() -> None:
    other = next_file(BASE, seed=9)
    with pytest.raises(PatchInvalid, match="does not become"):
        b"".join(delta.apply(other, PATCH, base_digest=digest(BASE)))


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(PatchInvalid, match="made for the base"):
        b"".join(delta.apply(BASE + b"\0", PATCH, base_digest=digest(BASE)))


def test_a_patch_that_was_cut_anywhere_is_refused() -> None:
    for end in [*range(HEAD_BYTES + 40), *range(HEAD_BYTES + 40, len(PATCH), 17), len(PATCH) - 1]:
        with pytest.raises(PatchInvalid):
            applied(BASE, PATCH[:end])


def test_bytes_after_the_patch_are_refused() -> None:
    with pytest.raises(PatchInvalid, match="follow the end"):
        applied(BASE, PATCH + b"\0")


@given(st.integers(0, len(PATCH) - 1), st.integers(1, 255))
def test_a_flipped_bit_gives_the_same_file_or_a_named_error(place: int, flip: int) -> None:
    """A flipped bit gives the same file only where zstd has bits that mean nothing."""
    patch = bytearray(PATCH)
    patch[place] ^= flip
    try:
        made = applied(BASE, bytes(patch))
    except PatchInvalid:
        return
    assert made == NEW


def stream(content: bytes, *, write_content_size: bool = True) -> bytes:
    frame = zstandard.ZstdCompressor(write_content_size=write_content_size).compress(content)
    return len(frame).to_bytes(4, "little") + frame


def block(count: int, *streams: bytes) -> bytes:
    """A patch whose first block is this; what follows it is of the right length."""
    return PATCH[:HEAD_BYTES] + count.to_bytes(4, "little") + b"".join(streams) + bytes(32 + 4 + 32)


SMALL = file_of({"a": ("BF16", bytes(range(40))), "b": ("U8", b"base")})
HEADER = header_of(memoryview(SMALL))
COUNTS = {"a": 20, "b": 4}
WIDTHS = {"a": 2, "b": 1}
GAPS = st.sampled_from([0, 0, 0, 0, 0, 1, 20, 255])


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    """A patch for `SMALL` whose parts unfold, but for the last of them perhaps, and say anything."""
    packed = zstandard.ZstdCompressor().compress(HEADER) if draw(st.booleans()) else b""
    patch = head(SMALL, len(SMALL), HEADER, packed)
    for name, elements in COUNTS.items():
        count = draw(st.integers(0, elements) | st.sampled_from([1, elements, elements + 1]))
        gaps = draw(st.lists(GAPS, min_size=count, max_size=count + draw(st.integers(0, 1))))
        lanes = [stream(draw(st.binary(min_size=count, max_size=count))) for _ in range(WIDTHS[name])]
        patch += count.to_bytes(4, "little") + (b"".join([stream(bytes(gaps)), *lanes]) if count else b"")
        patch += draw(st.just(digest_of(SMALL, name)) | st.binary(min_size=32, max_size=32))
    return draw(st.just(patch) | st.just(patch) | st.just(patch[:-1]))


def digest_of(file: bytes, name: str) -> bytes:
    """Return the digest of one tensor as it is in the file."""
    tensor = next(tensor for tensor in layout(HEADER, len(file)) if tensor.name == name)
    return bytes.fromhex(digest(file[tensor.begin : tensor.end]))


def test_garbage_is_refused_by_name_however_deep_it_is() -> None:
    met: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(forged() | st.binary(max_size=300))
    def read(patch: bytes) -> None:
        met["patches"] += 1
        try:
            made = applied(SMALL, patch)
        except PatchInvalid as refused:
            met[next((word for word in WORDS if word in refused.message), "another")] += 1
        else:
            met["applied"] += 1
            assert made == SMALL, "every digest in it is of the base's tensors, or of chance"
            with pytest.raises(PatchInvalid, match="follow the end"):
                applied(SMALL, patch + b"!")

    read()
    assert met["applied"], met
    for word in WORDS:
        assert met[word], f"no patch came as far as {word!r}: {met}"


WORDS = ("ends too early", "lists", "are listed, and", "is outside", "does not become")
"""One of each refusal's, from the first check to the last."""


ELEMENTS = 20_000
ONE = stream(b"\2")


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (block(ELEMENTS + 1, ONE, ONE, ONE), "lists 20001 of them"),
        (block(2**32 - 1, ONE, ONE, ONE), "lists 4294967295 of them"),
        (block(1, stream(bytes(10 * limits.MIB)), ONE, ONE), "decompresses to 10485760 bytes"),
        (block(1, ONE, stream(bytes(10 * limits.MIB)), ONE), "decompresses to 10485760 bytes"),
        (block(1, ONE, stream(b"\2", write_content_size=False), ONE), "decompresses to -1 bytes"),
        (block(1, stream(b""), ONE, ONE), "decompresses to 0 bytes"),
        (block(1, stream(b"\xff" * 40 + b"\0"), ONE, ONE), None),
        (block(1, stream(b"\xff" * 78 + b"\x6e"), ONE, ONE), "place 20000 is outside"),
        (block(1, stream(b"\xff"), ONE, ONE), "1 elements are listed, and 0 places"),
        (block(1, stream(b"\0\0"), ONE, ONE), "1 elements are listed, and 2 places"),
        (block(1, stream(b"\0\xff"), ONE, ONE), "1 elements are listed, and 1 places"),
        (block(1, (4).to_bytes(4, "little") + b"what", ONE, ONE), "cannot be decompressed"),
        (block(1, (2**31).to_bytes(4, "little"), ONE, ONE), "ends too early"),
        (block(1, stream(b"\2")[:4] + b"\0" * 5 + stream(b"\2")[4:], ONE, ONE), None),
    ],
)  # fmt: skip
def test_a_block_that_contradicts_itself_is_refused_before_it_costs_memory(patch: bytes, why: str | None) -> None:
    with pytest.raises(PatchInvalid, match=why):
        applied(BASE, patch)


def test_bytes_after_a_frame_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(b"\2") + b"more"
    with pytest.raises(PatchInvalid, match="cannot be decompressed"):
        applied(BASE, block(1, len(frame).to_bytes(4, "little") + frame, ONE, ONE))


def head(base: bytes, size: int, header: bytes, packed: bytes) -> bytes:
    sizes = len(base).to_bytes(8, "little") + size.to_bytes(8, "little")
    rest = len(header).to_bytes(4, "little") + len(packed).to_bytes(4, "little")
    return delta.MAGIC + bytes.fromhex(digest(base)) + sizes + rest + packed


HUGE = {"t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 2**60]}}


@pytest.mark.parametrize(
    "header",
    [
        b"", b"\0" * 8, b"\x01" + b"\0" * 7 + b"{", raw_file(b"[]"), raw_file(b"nonsense"), raw_file(b"[" * 100_000),
        raw_file({"t": 1}), raw_file({"t": {"dtype": "U8"}}), raw_file({"t": {"dtype": 8, "data_offsets": [0, 0]}}),
        raw_file({"t": {"dtype": "U8", "data_offsets": [0]}}), raw_file({"t": {"dtype": "U8", "data_offsets": [1, 2]}}),
        raw_file({"t": {"dtype": "U8", "data_offsets": [0, True]}}), raw_file(b'{"t": {}, "t": {}}'), raw_file(b"\xff"),
        raw_file({"t": {"dtype": "U8", "data_offsets": [0.0, 2.0]}}), raw_file(HUGE), raw_file({}),
        raw_file({"t": {"dtype": "BF16", "data_offsets": [0, 1]}}),
        raw_file({"t": {"dtype": "U8", "data_offsets": [2, 0]}}),
        raw_file({name: {"dtype": "U8", "data_offsets": [0, 2]} for name in "ab"}),
    ],
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused(header: bytes) -> None:
    patch = head(BASE, len(header) + 2, header, zstandard.ZstdCompressor().compress(header))
    with pytest.raises(PatchInvalid):
        applied(BASE, patch + bytes(1000))
    with pytest.raises(PatchInvalid):
        encoded(BASE, header + b"\0\0")


def test_a_header_that_unfolds_beyond_its_limit_is_refused() -> None:
    huge = bytes(limits.TENSORS_HEADER_MAX_BYTES + 1)
    with pytest.raises(PatchInvalid, match="decompresses to"):
        applied(BASE, head(BASE, 10**9, huge, zstandard.ZstdCompressor().compress(huge)))


def test_a_file_that_claims_a_petabyte_gives_no_more_than_its_reader_takes() -> None:
    """Blocks without changes are short, so a small patch can stand for a huge new tensor: whoever writes it counts."""
    header = raw_file(HUGE)
    patch = head(BASE, len(header) + 2**60, header, zstandard.ZstdCompressor().compress(header)) + bytes(4000)
    taken = delta.apply(BASE, patch, base_digest=digest(BASE))
    assert len(next(taken)) == len(header)
    assert {len(next(taken)) for _ in range(16)} == {B}
