"""Speed of the check of a chunk: the BLAKE3 check of `protocol.policy.chunks` against SHA-256 of the same bytes.

- Every chunk is checked at every arrival, on one thread, beside generation; so the check must cost little.
- The two take turns in one process, over more bytes than the processor caches.
"""

import hashlib
import os
import time
from collections.abc import Callable

from bench.harness import Bench, no_options, quick_from_environment
from protocol.ids import ChunkId
from protocol.limits import CHUNK_MAX_BYTES
from protocol.policy.chunks import chunk_id, verify


def sha256(_chunk: ChunkId, data: bytes) -> None:
    """The check that a SHA-256 name would ask for."""
    hashlib.sha256(data).digest()


def megabytes_per_second(check: Callable[[ChunkId, bytes], None], chunks: dict[ChunkId, bytes]) -> float:
    """The speed of one pass over all chunks."""
    started = time.perf_counter()
    for chunk, data in chunks.items():
        check(chunk, data)
    return sum(map(len, chunks.values())) / 1e6 / (time.perf_counter() - started)


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    count, rounds = (8, 5) if quick else (32, 15)
    inputs = {"chunk_bytes": CHUNK_MAX_BYTES, "chunks": count, "rounds": rounds}
    bench = Bench("chunks", inputs=inputs, quick=quick)
    chunks = {chunk_id(data): data for data in (os.urandom(CHUNK_MAX_BYTES) for _ in range(count))}
    for _ in range(rounds):
        bench.measure("verify, BLAKE3", megabytes_per_second(verify, chunks), unit="MB/s")
        bench.measure("SHA-256", megabytes_per_second(sha256, chunks), unit="MB/s")
    speedup = bench.ratio("verify / SHA-256", "verify, BLAKE3", "SHA-256")
    bench.goal("checking a chunk is at least 3 times as fast as SHA-256", speedup, at_least=3.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
