"""Sparse lossless patches from one version of a safetensors file to the next.

At the learning rates of RL about one weight in a hundred changes its bf16 value from one version to the next, mostly by
one unit in the last place. A patch says which elements changed, and by how many such units. Numbers are little-endian.

    Patch    "ESDELTA1" · base digest 32 bytes · base size u64 · size u64 · header size u32 · packed size u32
             · header: zstd frame of the new file's header, with its 8 bytes of size, which `header size` includes;
               with packed size 0 it is the base's, and not here
             · one Tensor for each tensor of the new file, sorted by beginning, end and name
    Tensor   one Block for each 4 MiB of it, the last shorter, but at least one · BLAKE3 of its new bytes, 32 bytes
    Block    count u32 of listed elements; if it is not 0:
             · Stream of gaps · one Stream for each byte of an element: byte k of every listed element's change
    Stream   packed size u32 · zstd frame, which states its content size

- An element has 8 bytes in F64, I64 and U64; 4 in F32, I32, U32 and C64; 2 in F16, BF16, I16 and U16; else 1.
- Gaps count the unlisted elements before each listed one: a byte below 255 ends a gap, a byte of 255 adds 255 to it.
  So positions cannot fail to increase. What is not listed keeps the base's bytes.
- A change is the difference of the two elements as integers ordered like the floats (the bits inverted if the sign bit
  is set, else with the sign bit set), modulo the width, in zigzag form: 0, -1, 1, -2 … are 0, 1, 2, 3 …
- The base of a tensor is the base's tensor of the same name and length; where there is none, as many zero bytes.
- Where more than a quarter of a block changed, all of its elements are listed: cheaper to code, and no longer.
- Equal inputs have equal patches, with one release of zstd.

A reader checks each size before it allocates, and the digest of each tensor when it is complete; every error is
`PatchInvalid`. Bytes returned before that are not trusted until all are read and the file's digest is right.
Both directions hold a few blocks at a time; inputs may be memory-mapped files. `each` is `map`, or the `map` of a
thread pool: numpy, zstd and BLAKE3 run in parallel.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from protocol import limits
from protocol.errors import PatchInvalid
from protocol.policy.tensors import Tensor, header_of, layout

MAGIC = b"ESDELTA1"

_HEAD = struct.Struct("<8s32sQQII")
_SIZE = struct.Struct("<I")
_DIGEST_BYTES = 32
_ZSTD_LEVEL = 1
_DENSE = 4
"""The bound of sparse patches: if more than one element in `_DENSE` changed, all are listed."""

_WINDOW = 4
"""Blocks that are started together; two such windows are in memory."""

_ZEROS = memoryview(bytes(limits.PATCH_BLOCK_BYTES))

Buffer = bytes | bytearray | memoryview
Each = Callable[..., Iterator[Any]]
"""`map`, or a function like it that keeps the order."""
Elements = NDArray[Any]
"""Unsigned integers as wide as the tensor's elements."""


def encode(base: Buffer, new: Buffer, *, base_digest: str, each: Each = map) -> Iterator[bytes]:
    """Yield the pieces of the patch from `base` to `new`; the caller stops if the patch is no smaller than the file."""
    base, new = memoryview(base), memoryview(new)
    old_header, header = header_of(base), header_of(new)
    packed = b"" if header == old_header else _pack(header)
    yield _HEAD.pack(MAGIC, bytes.fromhex(base_digest), len(base), len(new), len(header), len(packed)) + packed
    tensors = layout(header, len(new))
    bases = _Bases(base, old_header)
    pairs = ((bases.block(*place), _of(new, *place), place[0].element_bytes) for place in _blocks(tensors))
    coded = each(_encode_block, pairs)
    for tensor in tensors:
        hasher = blake3(max_threads=blake3.AUTO)
        for _, block in _blocks([tensor]):
            hasher.update(_of(new, tensor, block))
            yield next(coded)
        yield hasher.digest()


def apply(base: Buffer, patch: Buffer, *, base_digest: str, each: Each = map) -> Iterator[Buffer]:
    """Yield the new file, block by block; `base_digest` is the digest of `base`, which the caller computed."""
    base, reader = memoryview(base), _PatchReader(memoryview(patch))
    magic, wanted, base_size, size, header_size, packed_size = _HEAD.unpack(reader.read(_HEAD.size))
    if magic != MAGIC:
        raise PatchInvalid("These bytes are not a patch of a known format.")
    if wanted.hex() != base_digest or base_size != len(base):
        raise PatchInvalid(f"The patch is made for the base {wanted.hex()[:12]}…, not for {base_digest[:12]}….")
    old_header = header_of(base)
    largest = limits.TENSORS_HEADER_MAX_BYTES
    header = _unpack(reader.read(packed_size), header_size, largest) if packed_size else old_header
    if len(header) != header_size:
        raise PatchInvalid("The patch and its base disagree about the size of the header.")
    tensors = layout(header, size)
    yield header
    jobs = _jobs(reader, _Bases(base, old_header), tensors)
    hasher = blake3(max_threads=blake3.AUTO)
    for job, data in _done(jobs, each):
        hasher.update(data)
        yield data
        if job.digest is not None:
            if hasher.digest() != job.digest:
                raise PatchInvalid(f"Tensor {job.tensor.name[:100]!r} does not become what the patch promises.")
            hasher.reset()
    reader.require_end()


def _done(jobs: Iterator["_Job"], each: Each) -> Iterator[tuple["_Job", Buffer]]:
    """Yield the jobs in order with their results; each window is started before the results of the last are read."""
    begun: deque[Iterator[tuple[_Job, Buffer]]] = deque()
    while True:
        if window := list(islice(jobs, _WINDOW)):
            begun.append(zip(window, each(_apply_block, window), strict=True))
        if not begun:
            return
        if len(begun) > 1 or not window:
            yield from begun.popleft()


@dataclass(frozen=True)
class _Job:
    """A block to be patched."""

    tensor: Tensor
    old: memoryview
    count: int
    streams: list[memoryview]
    """Gaps, then the bytes of the changes; empty if no element is listed."""
    digest: memoryview | None
    """The digest of the whole tensor; only with its last block."""


def _jobs(reader: "_PatchReader", bases: "_Bases", tensors: list[Tensor]) -> Iterator[_Job]:
    """Yield the blocks as the patch lists them, not yet decompressed."""
    for tensor, block in _blocks(tensors):
        count = reader.size()
        streams = [reader.stream() for _ in range(1 + tensor.element_bytes)] if count else []
        digest = reader.read(_DIGEST_BYTES) if tensor.begin + block.stop == tensor.end else None
        yield _Job(tensor, bases.block(tensor, block), count, streams, digest)


class _Bases:
    """The tensors that the tensors of the new file are changes of."""

    def __init__(self, base: memoryview, header: bytes) -> None:
        self._base = base
        self._tensors = {tensor.name: tensor for tensor in layout(header, len(base))}

    def block(self, tensor: Tensor, block: slice) -> memoryview:
        """Return a block of the tensor's base, or zeros."""
        old = self._tensors.get(tensor.name)
        if old is None or old.end - old.begin != tensor.end - tensor.begin:
            return _ZEROS[: block.stop - block.start]
        return _of(self._base, old, block)


def _blocks(tensors: list[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    """Yield every block as its tensor and its place in it; an empty tensor has one empty block."""
    for tensor in tensors:
        size = tensor.end - tensor.begin
        for start in range(0, max(size, 1), limits.PATCH_BLOCK_BYTES):
            yield tensor, slice(start, min(start + limits.PATCH_BLOCK_BYTES, size))


def _of(file: memoryview, tensor: Tensor, block: slice) -> memoryview:
    return file[tensor.begin + block.start : tensor.begin + block.stop]


def _elements(data: Buffer, width: int) -> Elements:
    return np.frombuffer(data, f"<u{width}")


def _encode_block(pair: tuple[memoryview, memoryview, int]) -> bytes:
    """Return the encoded Block that leads from the first memory to the second; `pair` ends with the element width."""
    old, new = (_elements(data, pair[2]) for data in pair[:2])
    places = np.flatnonzero(old != new)
    if not len(places):
        return _SIZE.pack(0)
    if len(places) * _DENSE > len(new):
        gaps = np.zeros(len(new), np.uint8)
    else:
        gaps = _gaps(places)
        old, new = old[places], new[places]
    changes = _zigzag(_ordered(new) - _ordered(old)).view(np.uint8)
    streams = [_pack(gaps), *(_pack(changes[byte :: new.itemsize]) for byte in range(new.itemsize))]
    return _SIZE.pack(len(new)) + b"".join(_SIZE.pack(len(stream)) + stream for stream in streams)


def _apply_block(job: _Job) -> Buffer:
    """Return the patched block."""
    if not job.count:
        return job.old
    data = bytearray(job.old)
    elements = _elements(data, job.tensor.element_bytes)
    count, size = job.count, len(elements)
    if count > size:
        raise PatchInvalid(f"A block of {size} elements lists {count} of them.")
    places = _places(_unpack(job.streams[0], count, count + size // 255), count, size)
    changes = np.empty(count, elements.dtype)
    for byte, stream in enumerate(job.streams[1:]):
        changes.view(np.uint8)[byte :: elements.itemsize] = np.frombuffer(_unpack(stream, count, count), np.uint8)
    elements[places] = _unordered(_ordered(elements[places]) + _unzigzag(changes))
    return data


def _gaps(places: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Encode the numbers of unlisted elements before each place, as the module's docstring describes."""
    gaps = np.diff(places, prepend=-1) - 1
    wide = np.flatnonzero(gaps >= 255)
    escapes = gaps[wide] // 255
    gaps[wide] -= 255 * escapes
    return np.insert(gaps.astype(np.uint8), np.repeat(wide, escapes), 255)


def _places(coded: bytes, count: int, size: int) -> NDArray[np.intp] | slice:
    """Decode gaps to `count` increasing places below `size`."""
    gaps = np.frombuffer(coded, np.uint8)
    if count == size and not gaps.any():
        return slice(None)
    ends = np.flatnonzero(gaps != 255)
    if len(ends) != count or ends[-1] != len(gaps) - 1:
        raise PatchInvalid(f"{count} elements are listed, and {len(ends)} places.")
    places = np.cumsum(gaps, dtype=np.intp)[ends]
    places += np.arange(count)
    if places[-1] >= size:
        raise PatchInvalid(f"The place {places[-1]} is outside its block of {size} elements.")
    return places


def _ordered(floats: Elements) -> Elements:
    """Map the bits of floats to integers of the same order; a bijection for all bits."""
    integers = _signs(floats)
    integers |= _sign_bit(floats)
    integers ^= floats
    return integers


def _unordered(integers: Elements) -> Elements:
    floats: Elements = ~_signs(integers)
    floats |= _sign_bit(integers)
    floats ^= integers
    return floats


def _zigzag(changes: Elements) -> Elements:
    """Encode signed changes so that small ones of either sign become small numbers."""
    coded = _signs(changes)
    coded ^= changes << changes.dtype.type(1)
    return coded


def _unzigzag(coded: Elements) -> Elements:
    unit = coded.dtype.type(1)
    changes: Elements = ~(coded & unit) + unit
    changes ^= coded >> unit
    return changes


def _signs(values: Elements) -> Elements:
    """Return all bits set for each value whose highest bit is set, else none."""
    signed = values.view(f"<i{values.itemsize}")
    signs: Elements = (signed >> signed.dtype.type(8 * values.itemsize - 1)).view(values.dtype)
    return signs


def _sign_bit(values: Elements) -> Any:
    return values.dtype.type(1 << (8 * values.itemsize - 1))


def _pack(data: bytes | NDArray[np.uint8]) -> bytes:
    """Return a zstd frame."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data if isinstance(data, bytes) else data.tobytes())


def _unpack(frame: Buffer, smallest: int, largest: int) -> bytes:
    """Return the content of a frame, which must state a size from `smallest` to `largest` before it is decompressed."""
    try:
        size = zstandard.frame_content_size(frame)
        if not smallest <= size <= largest:
            raise PatchInvalid(
                f"A part of the patch decompresses to {size} bytes; {smallest} to {largest} are allowed."
            )
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PatchInvalid(f"A part of the patch cannot be decompressed: {error}.") from error


class _PatchReader:
    """A reader that splits a patch from its front and never reads beyond its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def read(self, size: int) -> memoryview:
        taken = self._data[self._position : self._position + size]
        if len(taken) != size:
            raise PatchInvalid("The patch ends too early.")
        self._position += size
        return taken

    def size(self) -> int:
        (size,) = _SIZE.unpack(self.read(_SIZE.size))
        return int(size)

    def stream(self) -> memoryview:
        return self.read(self.size())

    def require_end(self) -> None:
        if self._position != len(self._data):
            raise PatchInvalid(f"{len(self._data) - self._position} bytes follow the end of the patch.")
