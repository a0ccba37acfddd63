"""`make bench-replay`: an auditor's tokens per second on a real model, beside a node's, on one thread and on two.

- The model is SmolLM2-135M-Instruct in bfloat16 (`make test-real` makes its folder), or the folder that is named.
- A node samples groups with the torch engine on one thread, and the auditor replays just those in float32, in turns.
- Two threads are compared with one in the same round. The machine must be idle, and have two cores.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.harness import Bench, quick_from_environment
from coordinator.audit.scorer import VersionScorer
from coordinator.rules.replay import Prefill
from protocol.work.rollout import pack_tokens, unpack_logprobs, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

FOLDER = Path(".venv-real") / "smollm2"

SAMPLES = 8

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in a few sentences why the sky is blue.",
    "A farmer has 17 sheep and buys 25 more. How many legs do they have in all?",
    "Write a short story about a lighthouse keeper who collects clocks.",
    "Name three rivers in Africa and the seas that they flow into.",
    "How does a refrigerator keep things cold?",
    "Translate 'good morning, my friends' into Spanish and German.",
    "What should I pack for a week in the mountains in autumn?",
)


def requests(folder: Path, groups: int, tokens: int, seed: int = 0) -> list[SampleRequest]:
    """Ask for some groups, in the model's own chat format."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = []
    for number, question in enumerate(QUESTIONS[:groups]):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        asked.append(
            SampleRequest(
                request_id=str(number),
                version=1,
                prompt=pack_tokens(tokenizer(text)["input_ids"]),
                seed=seed + number,
                samples=SAMPLES,
                max_new_tokens=tokens,
                temperature=1.0,
            )
        )
    return asked


def sample(engine: TorchEngine, asked: Sequence[SampleRequest]) -> tuple[list[GroupDone], float]:
    """Answer the requests; return the groups in their order, and the seconds."""
    done = list[GroupDone]()
    began = time.perf_counter()
    engine.generate(list(asked), done.append)
    return sorted(done, key=lambda group: int(group.request_id)), time.perf_counter() - began


def replay(scorer: VersionScorer, asked: Sequence[SampleRequest], done: Sequence[GroupDone]) -> tuple[float, float]:
    """Replay the groups; return the seconds, and the largest error of a log-probability."""
    claims = [
        Prefill(
            unpack_tokens(request.prompt),
            [unpack_tokens(row.tokens) for row in group.samples],
            request.seed,
            request.temperature,
        )
        for request, group in zip(asked, done, strict=True)
    ]
    began = time.perf_counter()
    scored = scorer.score(claims)
    seconds = time.perf_counter() - began
    errors = [
        np.abs(scores.logprobs - np.array(unpack_logprobs(row.logprobs))).max()
        for group, rows in zip(done, scored, strict=True)
        for row, scores in zip(group.samples, rows, strict=True)
    ]
    return seconds, float(max(errors))


def main() -> int:
    """Measure, and judge by the goals."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench replay", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="a policy in hub format")
    parser.add_argument("--groups", type=int, default=2 if quick else len(QUESTIONS), choices=range(1, 9))
    parser.add_argument("--tokens", type=int, default=16 if quick else 64, help="of each sample at the most")
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    options = parser.parse_args()
    inputs = {"groups": options.groups, "samples": SAMPLES, "tokens": options.tokens, "rounds": options.rounds}
    bench = Bench("replay", inputs=inputs, quick=quick)
    asked = requests(options.folder, options.groups, options.tokens)
    torch.set_num_threads(1)
    engine, scorer = TorchEngine(dtype="float32"), VersionScorer(options.folder)
    engine.load(options.folder, 1)
    worst = 0.0
    for _ in range(options.rounds):
        torch.set_num_threads(1)
        done, seconds = sample(engine, asked)
        tokens = sum(len(row.tokens) // 4 for group in done for row in group.samples)
        bench.measure("sampling, one thread", tokens / seconds, unit="tokens/s")
        for threads, name in ((1, "replay, one thread"), (2, "replay, two threads")):
            torch.set_num_threads(threads)
            seconds, error = replay(scorer, asked, done)
            bench.measure(name, tokens / seconds, unit="tokens/s")
            worst = max(worst, error)
    bench.goal(
        "replay ÷ sampling", bench.ratio("replay / sampling", "replay, one thread", "sampling, one thread"), at_least=3
    )
    bench.goal("two threads ÷ one", bench.ratio("two / one", "replay, two threads", "replay, one thread"), at_least=1.6)
    bench.goal("largest error of an honest float32 node, nats", worst, at_most=1e-3)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
