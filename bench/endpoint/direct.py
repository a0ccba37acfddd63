"""The torch engine of a node without node and coordinator, in a process of its own: the time to the first token.

`python -P -m bench.endpoint.direct POLICY`

- The prompts are those of the callers, and the engine has one thread, as a node of the bench has.
"""

import sys
import time
from pathlib import Path

from bench.endpoint.callers import Endpoint
from bench.harness import serve
from protocol.policy.codec import PolicyCodec
from protocol.work.rollout import pack_tokens
from swarm_node.engine.messages import SampleRequest


def main() -> None:
    """Sample one token for each number that the parent sends, and answer with the seconds."""
    import torch

    from swarm_node.engine.torch.engine import TorchEngine

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    folder = Path(sys.argv[1])
    codec, engine = PolicyCodec((folder / "tokenizer.json").read_text()), TorchEngine()
    engine.load(folder, 1)

    def first_token(number: int) -> dict[str, float]:
        prompt = codec.encode(str(Endpoint("").body(number, 1)["prompt"]))
        began = time.monotonic()
        request = SampleRequest(
            request_id=f"{number:032x}",
            version=1,
            prompt=pack_tokens(prompt),
            samples=1,
            seed=number,
            temperature=1.0,
            max_new_tokens=1,
        )
        engine.generate([request], lambda _group: None)
        return {"seconds": time.monotonic() - began}

    serve(first_token)


if __name__ == "__main__":
    main()
