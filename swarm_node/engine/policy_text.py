"""The policy's tokenizer in the engine child; each use has limits of memory and time.

- A tokenizer.json is a program: a few nested replacement rules turn six characters into a billion, and some patterns
  never end. `tokenizers` holds the GIL meanwhile, so no thread of this process could stop it.
- The kernel stops it. If a use takes `MEMORY_MAX_BYTES` more than the process had, or `CPU_MAX_S` of CPU time, the
  child ends; the agent continues, and reports the version of the tokenizer.
- CPU time, so that a busy or sleeping machine does not make a tokenizer look hostile.
- Only Linux counts private memory (`RLIMIT_DATA`); on other systems only the agent's watch limits it (`memory`).
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from protocol import limits
from protocol.errors import EngineFailed
from protocol.policy import model_config
from protocol.policy.codec import PolicyCodec
from protocol.work.rollout import pack_tokens
from swarm_node.engine.memory import growth_limited

MEMORY_MAX_BYTES = 1024 * limits.MIB
"""A tokenizer of 28 MB, with 250,000 tokens, takes 300 MB while it is loaded."""

CPU_MAX_S = 10.0
"""The limit of CPU time: that tokenizer is loaded in 0.7 s, and no text of a task takes a tenth of that."""

FILE = "tokenizer.json"


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Let the kernel end this process if the block exceeds the limits; raise library errors as `EngineFailed`."""
    try:
        with growth_limited(MEMORY_MAX_BYTES):
            signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no `Exception`
        raise EngineFailed(f"The policy's {FILE} {what}: {error!r}"[:300]) from error


def encode(folder: Path, texts: Sequence[str]) -> tuple[bytes, ...]:
    """Return the packed tokens of each text, by the tokenizer of a policy folder."""
    with limited("cannot be used"):
        size_bytes = (folder / FILE).stat().st_size
        if size_bytes > limits.TOKENIZER_MAX_BYTES:
            raise ValueError(f"it has {size_bytes} bytes, and {limits.TOKENIZER_MAX_BYTES} are allowed")
        data = (folder / FILE).read_bytes()
        model_config.require_tokenizer(data)
        codec = PolicyCodec(data.decode())
    return tuple(_encoded(codec, text) for text in texts)


def _encoded(codec: PolicyCodec, text: str) -> bytes:
    with limited("cannot encode a text"):
        tokens = codec.encode(text)
    return _packed(tokens)


def _packed(tokens: list[int]) -> bytes:
    if not 1 <= len(tokens) <= limits.TOKENS_MAX:
        raise EngineFailed(
            f"The policy's tokenizer makes {len(tokens)} tokens of a short text; 1 to {limits.TOKENS_MAX} can be used."
        )
    return pack_tokens(tokens)
