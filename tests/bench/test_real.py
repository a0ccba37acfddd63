"""bench/real: the contenders draw what they are asked for, and a contender that dies says why."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench.harness import Child
from bench.real.samplers import KINDS, Asked, command, endless
from bench.real.sampling import count
from tests.swarm_node.engine.asking import SIZES
from tests.tiny_policy import make_other_policy

WORK = [Asked([19, 20, 31], 3, 5), Asked([19], 2, 1), Asked(list(range(10, 30)), 2, 9)]
"""Prompts and completions of unequal lengths, and one that its first token ends."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy of SmolLM2's kind, which never ends."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    made = make_other_policy(tmp_path_factory.mktemp("llama"), config, dtype=torch.float32)
    return endless(made, tmp_path_factory.mktemp("endless") / "policy")


@pytest.mark.parametrize("kind", KINDS)
def test_every_contender_draws_the_tokens_that_are_asked_for_time_and_again(llama: Path, kind: str) -> None:
    sampler = KINDS[kind](llama, "float32", 1)
    for work in (WORK, WORK[:1], WORK):
        assert sampler(work) == count(work)


def test_a_contender_in_its_process_says_what_it_took(llama: Path) -> None:
    with closing(Child(command("llama.cpp", "float16", llama, 1))) as child:
        answer = child.ask(WORK)
    assert answer["tokens"] == count(WORK)
    assert answer["seconds"] > 0
    assert answer["peak"] >= child.ready["peak"] > 10


def test_a_contender_that_dies_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3:\nno such model"):
        Child([sys.executable, "-c", "import sys; print('no such model', file=sys.stderr); sys.exit(3)"])
