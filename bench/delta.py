"""Size and speed of patches: the codec alone, and the versions of a real RL run as nodes get them.

- Speeds are of the clock, and per second of one core's work: the second says what other work on the cores took away.
- Codec: bf16 weights of ordinary size, one in a hundred moved by one unit; encoded and applied on all cores, beside
  what nothing can beat: copying the same bytes, and hashing them.
- Run: a Qwen3 of 27 million parameters, sampled by the nodes' engine and trained by the learner's GRPO at the learning
  rate of RL, published every kappa updates by the coordinator's publisher, and rebuilt by a node that holds the version
  before. The reward is the share of digits in an answer: an untrained model can earn it, so every update has a signal.
- Adapters: the same model with LoRA, whose versions are adapters beside a base, against its merged weights as patches.
- Bytes are exact, publishing and rebuilding are measured. The time to reach a node is computed from these and from what
  a link takes for the bytes: nothing is broadcast here.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from blake3 import blake3
from numpy.typing import NDArray
from transformers import AutoTokenizer, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, no_options, quick_from_environment
from coordinator.learner.embedded import EmbeddedShape, make_model, make_tokenizer
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from protocol.limits import CHUNK_MAX_BYTES
from protocol.policy import chunks, delta
from protocol.policy.manifest import PolicyManifest, Sampler
from protocol.tasks import stand_in
from protocol.work.learning import Publication, TrainingGroup, TrainingSample, UploadedFile
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_node.chunks.blobs import BlobStore
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.versions import assemble

LEARNING_RATE = 1e-6
LORA_LEARNING_RATE, LORA_RANK = 1e-5, 16
"""Adapters begin at zero and take larger steps."""
KAPPA = 3
GROUPS, SAMPLES, TOKENS = 4, 8, 12
SHAPE = EmbeddedShape(hidden=512, layers=8, heads=8, intermediate=1536)
SMALL = EmbeddedShape(hidden=256, layers=4, heads=4, intermediate=768)
LINK_BYTES_S = 100e6 / 8
"""The papers' volunteer: 100 Mbit/s."""


def weights(size_bytes: int, tensor_bytes: int) -> tuple[bytes, bytes]:
    """Two files of bf16 weights, the second with one weight in a hundred moved by one unit."""
    rng = np.random.default_rng(0)
    count = size_bytes // 2
    floats = rng.standard_normal(count, np.float32) * np.float32(0.02)
    old = (floats.view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    places = rng.choice(count, count // 100, replace=False)
    new[places] += rng.choice(np.array([1, 2**16 - 1], np.uint16), len(places))
    return _file(old, tensor_bytes), _file(new, tensor_bytes)


def _file(values: NDArray[np.uint16], tensor_bytes: int) -> bytes:
    tensors = torch.split(torch.from_numpy(values.view(np.int16)).view(torch.bfloat16), tensor_bytes // 2)
    return safetensors.torch.save({f"layer.{number}": tensor for number, tensor in enumerate(tensors)})


def measure_codec(bench: Bench, size_bytes: int, rounds: int) -> None:
    """Encode, apply, copy and hash in turns."""
    base, new = weights(size_bytes, 32 * 2**20)
    base_digest, digest = chunks.digest(base), chunks.digest(new)
    with ThreadPoolExecutor(os.cpu_count()) as threads:

        def encode() -> bytes:
            return b"".join(delta.encode(base, new, base_digest=base_digest, each=threads.map))

        def apply(patch: bytes) -> str:
            hasher = blake3(max_threads=blake3.AUTO)
            for block in delta.apply(base, patch, base_digest=base_digest, each=threads.map):
                hasher.update(block)
            return hasher.hexdigest()

        patch, target = encode(), bytearray(len(new))
        bench.check("the patched file has the digest of the new one", apply(patch) == digest)
        cases: dict[str, Callable[[], object]] = {
            "encode": encode,
            "apply": lambda: apply(patch),
            "limit: hash": lambda: blake3(new, max_threads=blake3.AUTO).digest(),
            "limit: copy": lambda: memoryview(target).__setitem__(slice(None), new),
        }
        for _ in range(rounds):
            for case, work in cases.items():
                started, busy = time.perf_counter(), time.process_time()
                work()
                bench.measure(case, len(new) / 1e9 / (time.perf_counter() - started), unit="GB/s of model")
                bench.measure(f"{case}, per core", len(new) / 1e9 / (time.process_time() - busy), unit="GB per CPU s")
    bench.measure("codec: patch / file", 100 * len(patch) / len(new), unit="%")
    for case in ("encode", "apply"):
        bench.goal(f"{case} at 1 GB/s of model size", bench.median(case), at_least=1.0)


def make_start(folder: Path, shape: EmbeddedShape) -> Path:
    """A random Qwen3 in bf16 and the demo's tokenizer."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0, shape=shape)
    model.config.initializer_range = 0.02  # of models of that size; the narrow default is wider
    torch.manual_seed(0)
    fresh: Any = Qwen3ForCausalLM(model.config)
    fresh.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Run:
    """A learner, a publisher and one node, in one folder; a learner of adapters publishes these, or merged weights."""

    def __init__(
        self,
        folder: Path,
        start: Path,
        *,
        learning_rate: float = LEARNING_RATE,
        lora_rank: int = 0,
        merged: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._adapters = folder, lora_rank > 0 and not merged
        self._tokenizer: Any = AutoTokenizer.from_pretrained(start)
        self._digits = {self._tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"}
        self.policy = TrainedPolicy(start, TrainSettings(learning_rate, warmup_updates=1, lora_rank=lora_rank))
        self._engine = TorchEngine()
        self._publisher = Publisher(
            folder=folder,
            metadata=SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, utc_now()),
            task="arithmetic",
            sampler=Sampler(temperature=1.0, max_new_tokens=TOKENS),
            chunk_size_bytes=CHUNK_MAX_BYTES,
            keep=2,
        )
        self._policies, self._blobs = folder / "policies", BlobStore(self._publisher.blobs)
        self.parameters = sum(parameter.numel() for parameter in self.policy.model.parameters())
        self.version = 0

    def train(self) -> float:
        """Train one update on fresh rollouts of the newest version; return the mean reward."""
        groups: list[GroupDone] = []
        first = self.policy.update * GROUPS
        requests = {str(number): self._request(number) for number in range(first, first + GROUPS)}
        self._engine.generate(list(requests.values()), groups.append)
        return self.policy.train_step([self._reward(group, requests[group.request_id]) for group in groups]).metrics[
            "reward/mean"
        ]

    def publish(self) -> tuple[PolicyManifest, float]:
        """Upload and publish the policy as it stands; the seconds it took to cut, encode, verify and sign."""
        self.version += 1
        folder = self._publisher.uploads / str(self.version)
        if self._adapters:
            self.policy.writer.save_base(folder)
            self.policy.writer.save_adapter(folder)
        else:
            self.policy.writer.save_hub(folder)
        files = tuple(
            UploadedFile(path=path.name, digest=chunks.digest(path.read_bytes())) for path in sorted(folder.iterdir())
        )
        publication = Publication(version=self.version, update=self.policy.update, files=files)
        started = time.perf_counter()
        manifest, _ = self._publisher.publish(publication)
        seconds = time.perf_counter() - started
        self._publisher.forget_old(self.version)
        return manifest, seconds

    def follow(self, manifest: PolicyManifest) -> tuple[int, float, bool]:
        """Update a node with the previous version; return bytes fetched, seconds to rebuild, and whether they match."""
        started = time.perf_counter()
        bases = assemble.held_files(self._policies, manifest)
        folder = assemble.assemble(self._policies, manifest, self._blobs, bases)
        seconds = time.perf_counter() - started
        uploaded = self._publisher.uploads / str(self.version)
        same = all((folder / path.name).read_bytes() == path.read_bytes() for path in uploaded.iterdir())
        self._engine.load(folder, self.version)
        assemble.prune(self._policies, [folder])
        return sum(manifest.chunk_sizes_for(bases).values()), seconds, same

    def _request(self, number: int) -> SampleRequest:
        prompt = self._tokenizer.encode(stand_in("arithmetic", number), add_special_tokens=False)
        return SampleRequest(
            request_id=str(number),
            version=self.version,
            prompt=pack_tokens(prompt),
            seed=number,
            samples=SAMPLES,
            max_new_tokens=TOKENS,
            temperature=1.0,
        )

    def _reward(self, group: GroupDone, request: SampleRequest) -> TrainingGroup:
        samples = tuple(
            TrainingSample(tokens=sample.tokens, logprobs=sample.logprobs, reward=self._share_of_digits(sample.tokens))
            for sample in group.samples
        )
        claim = f"{int(group.request_id):064x}"
        return TrainingGroup(claim_id=claim, prompt=request.prompt, policy_update=self.policy.update, samples=samples)

    def _share_of_digits(self, tokens: bytes) -> float:
        said = unpack_tokens(tokens).tolist()
        return sum(token in self._digits for token in said) / len(said)


def measure_run(bench: Bench, run: Run, versions: int) -> Iterator[str]:
    """Publish and follow so many versions; a line of progress for each."""
    manifest, _ = run.publish()
    full, seconds, same = run.follow(manifest)
    bench.measure("full: bytes", full / 1e6, unit="MB")
    bench.measure("full: rebuild", seconds, unit="s")
    largest = 0
    yield f"{run.parameters / 1e6:.1f} million parameters, {full / 1e6:.1f} MB in full"
    for _ in range(versions):
        rewards = [run.train() for _ in range(KAPPA)]
        manifest, publish_s = run.publish()
        fetched, rebuild_s, equal = run.follow(manifest)
        same, largest = same and equal, max(largest, fetched)
        bench.measure("patch: bytes", fetched / 1e6, unit="MB")
        bench.measure("patch: full / patch", full / fetched, unit="×")
        bench.measure("patch: publish", publish_s, unit="s")
        bench.measure("patch: rebuild", rebuild_s, unit="s")
        computed_s = publish_s + fetched / LINK_BYTES_S + rebuild_s
        bench.measure("patch: to a node at 100 Mbit/s, computed", computed_s, unit="s")
        bench.measure("full: to a node at 100 Mbit/s, computed", full / LINK_BYTES_S + seconds, unit="s")
        yield f"version {run.version}: {fetched / 1e3:.0f} kB, reward {rewards[-1]:.3f}"
    bench.check("every version rebuilt from patches has the bytes of the learner's", same)
    bench.goal("20 times fewer bytes than full, in every version", full / largest, at_least=20.0)


def measure_adapters(bench: Bench, folder: Path, start: Path, versions: int) -> Iterator[str]:
    """Measure the same learner with adapters, whose versions are adapters, and merged weights as patches."""
    for case in ("adapter", "merged"):
        run = Run(folder / case, start, learning_rate=LORA_LEARNING_RATE, lora_rank=LORA_RANK, merged=case == "merged")
        full, _, same = run.follow(run.publish()[0])
        for _ in range(versions):
            for _ in range(KAPPA):
                run.train()
            manifest, publish_s = run.publish()
            fetched, rebuild_s, equal = run.follow(manifest)
            same = same and equal
            bench.measure(f"LoRA, {case}: bytes", fetched / 1e6, unit="MB")
            bench.measure(f"LoRA, {case}: full / version", full / fetched, unit="×")
            bench.measure(f"LoRA, {case}: publish", publish_s, unit="s")
            bench.measure(f"LoRA, {case}: rebuild", rebuild_s, unit="s")
            yield f"LoRA, {case}: version {run.version}: {fetched / 1e3:.0f} kB"
        bench.check(f"every version of adapters, {case}, has the bytes of the learner's", same)


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    size_bytes, rounds, versions, shape = (2**26, 3, 2, SMALL) if quick else (2**29, 7, 6, SHAPE)
    inputs = {"codec_bytes": size_bytes, "rounds": rounds, "learning_rate": LEARNING_RATE, "kappa": KAPPA}
    bench = Bench("delta", inputs=inputs | {"versions": versions, "shape": list(shape)}, quick=quick)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    measure_codec(bench, size_bytes, rounds)
    with tempfile.TemporaryDirectory() as folder:
        start = make_start(Path(folder) / "start", shape)
        for line in measure_run(bench, Run(Path(folder) / "run", start), versions):
            print(line, flush=True)
        for line in measure_adapters(bench, Path(folder), start, versions):
            print(line, flush=True)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
