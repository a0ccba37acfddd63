"""One tiny policy of an architecture through every part that computes with a policy: what each part makes of it.

- A cell is the way in which a part works, or `refused`. Anything else that happens is an error of the test that asks.
- A part works if it says of every token what transformers' own eager attention says of the sequence alone, within
  `NATS_MAX`; llama.cpp within `HALF_NATS_MAX` where it reads an activation from a table in half precision.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coordinator.audit.scorer import VersionScorer
from coordinator.config import ModelSection
from coordinator.learner import start
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from coordinator.model.batch import collate
from coordinator.model.forward import completion_logprobs, packs
from coordinator.rules.replay import Prefill
from protocol.errors import SwarmError
from protocol.work.rollout import unpack_logprobs, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.torch.engine import TorchEngine
from tests.architectures import zoo
from tests.coordinator.learner.groups import group
from tests.swarm_node.engine.asking import asked, sample

NATS_MAX = 1e-3
HALF_NATS_MAX = 5e-3

HALF = ", half precision"
"""Added to the cell of an engine that computes a part of a float32 policy in float16."""

REFUSED = "refused"

TRAIN = TrainSettings(learning_rate=1e-2)
ADAPT = TrainSettings(learning_rate=1e-2, lora_rank=4)


def texts(seed: int, *lengths: int) -> list[list[int]]:
    """Random tokens."""
    chance = np.random.Generator(np.random.Philox(seed))
    return [chance.integers(3, zoo.SIZES["vocab_size"], length).tolist() for length in lengths]


GROUPS = tuple(
    group(
        number,
        texts(number, width)[0],
        [(text, [-5.0] * len(text), float(len(text) % 2)) for text in texts(9, *lengths)],
    )
    for number, (width, lengths) in enumerate([(9, (5, 1, 12)), (3, (8, 2, 7)), (14, (3, 9, 4))])
)
"""Prompts and completions of unequal lengths, in no order; most are longer than a window."""


class Row(NamedTuple):
    """The results of each part for one architecture."""

    launch: str
    learner: str
    adapters: str
    published: str
    torch: str
    swap: str
    llama: str
    auditor: str


def alone(folder: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    """Return what transformers says of one completion of a policy, whose files must hold all of its tensors and no
    other.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, found = loaded
    assert not found["missing_keys"], found
    assert not found["unexpected_keys"], found

    def say(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen: torch.Tensor = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return chosen

    return say


Say = Callable[[list[int], list[int]], torch.Tensor]


def row(name: str, folder: Path) -> Row:
    """Try every part."""
    made = zoo.make(name, folder / "start")
    say = alone(made)
    prompt, tokens = texts(1, 9, 4)
    other = [*prompt[:-2], prompt[-2] + 1, prompt[-1]]
    assert (say(prompt, tokens) - say(other, tokens)).abs().max() > 10 * NATS_MAX, "no error would show"
    launch = tried(lambda: _launch(made))
    if launch == REFUSED:
        parts = (lambda: _learner(made, say), lambda: _engine(TorchEngine(), made, say), lambda: _auditor(made, say))
        assert all(tried(part) == REFUSED for part in parts)
        return Row(launch, *[REFUSED] * 7)
    return Row(
        launch,
        tried(lambda: _learner(made, say)),
        tried(lambda: _adapters(made, folder / "adapted")),
        tried(lambda: _published(made, folder)),
        tried(lambda: _engine(TorchEngine(), made, say)),
        tried(lambda: _swap(folder)),
        tried(lambda: _llama(made, folder, say)),
        tried(lambda: _auditor(made, say)),
    )


def tried(part: Callable[[], str]) -> str:
    """The way in which it works, or that it is refused by name."""
    try:
        return part()
    except SwarmError as error:
        if not any(word in error.message for word in ("support", "cannot be added")):
            raise
        return REFUSED


def _launch(folder: Path) -> str:
    start.require_here(ModelSection(path=str(folder)))
    return "yes"


def _learner(folder: Path, say: Say) -> str:
    policy, data = TrainedPolicy(folder, TRAIN), collate(GROUPS)
    with torch.no_grad():
        found, _ = completion_logprobs(policy.model, data, torch.arange(len(data.mask)), TRAIN.products)
    for number, length in enumerate(data.lengths.tolist()):
        prompt, tokens = data.prompts[data.owners[number]].tolist(), data.tokens[number, :length].tolist()
        _require_near(found[number, :length], say(prompt, tokens))
    return "packed" if packs(policy.model) else "in rows"


def _published(folder: Path, target: Path) -> str:
    """Two versions, of which the second is loaded back, and says what the learner says."""
    policy = TrainedPolicy(folder, TRAIN)
    policy.writer.save_hub(target / "v1")
    policy.train_step(GROUPS)
    policy.writer.save_hub(target / "v2")
    _learner(target / "v2", alone(target / "v2"))
    return "yes"


def _adapters(folder: Path, target: Path) -> str:
    """An adapter beside its base, in the engine and at the auditor, against the merged weights."""
    policy = TrainedPolicy(folder, ADAPT)
    policy.train_step(GROUPS)
    policy.writer.save_base(target / "beside")
    policy.writer.save_adapter(target / "beside")
    policy.writer.save_hub(target / "merged")
    say = alone(target / "merged")
    _engine(TorchEngine(), target / "beside", say)
    _auditor(target / "beside", say)
    return "yes"


def _engine(engine: Engine, folder: Path, say: Say) -> str:
    half = engine.load(folder, 1).numerics.split("/")[1] == "fp16"
    prompts = texts(5, 3, 9, 1, 17)
    groups = sample(engine, *[asked(prompt, seed, samples=3) for seed, prompt in enumerate(prompts)])
    for seed, prompt in enumerate(prompts):
        for one in groups[f"seed {seed}"]:
            found, wanted = torch.tensor(unpack_logprobs(one.logprobs)), say(prompt, unpack_tokens(one.tokens).tolist())
            _require_near(found, wanted, HALF_NATS_MAX if half else NATS_MAX)
    return "yes" + HALF * half


def _llama(made: Path, folder: Path, say: Say) -> str:
    """Right in float32, and the second version over the first."""
    right = _engine(LlamaEngine(dtype="float32"), made, say)
    return _swap(folder, lambda: LlamaEngine(dtype="float32")) + HALF * right.endswith(HALF)


def _swap(folder: Path, make: Callable[[], Engine] = TorchEngine) -> str:
    """The second version over the first, which then says what a fresh engine says."""
    engine, fresh = make(), make()
    engine.load(folder / "v1", 1)
    rebuilt = engine.load(folder / "v2", 2).rebuilt
    fresh.load(folder / "v2", 2)
    wanted = asked(texts(5, 9)[0], version=2)
    assert sample(engine, wanted) == sample(fresh, wanted)
    return "cold" if rebuilt else "in place"


def _auditor(folder: Path, say: Say) -> str:
    claims = [
        Prefill(np.array(prompt, np.uint32), [np.array(text, np.uint32) for text in texts(7, 1, 7, 3)], 1, 1.0)
        for prompt in texts(6, 4, 11, 2)
    ]
    scorer = VersionScorer(folder)
    for claim, scored in zip(claims, scorer.score(claims), strict=True):
        for tokens, one in zip(claim.completions, scored, strict=True):
            _require_near(torch.tensor(one.logprobs), say(claim.prompt.tolist(), tokens.tolist()))
    return "packed" if scorer.packs else "in rows"


def _require_near(found: torch.Tensor, wanted: torch.Tensor, nats_max: float = NATS_MAX) -> None:
    assert (found.cpu() - wanted).abs().max() <= nats_max
