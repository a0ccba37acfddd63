"""A policy that answers the sums of the cookbook in their format half of the time, made by supervised training.

    python -m tests.tinker.warm_policy FOLDER [SECONDS]

- A recipe rewards right answers, and punishes those that do not end as its renderer does. An untrained policy does
  neither, and learns nothing from that. This one ends half of its answers, and fills the others with zeros.
- Prompts are those of the recipe's renderer `role_colon` with its one example.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.learner.embedded import EmbeddedShape, make_policy

SHAPE = EmbeddedShape(hidden=64, layers=2, heads=4, intermediate=256)

BATCH, END = 32, 1.01
"""Rows of a step; the weight of the tokens that end an answer, which tells them from the others."""


def warm_policy(folder: Path, *, enough: float = 0.42, seconds: float = 240.0) -> float:
    """Write the policy, and return the share of its answers that end."""
    make_policy(folder, seed=1, shape=SHAPE)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encode = AutoTokenizer.from_pretrained(folder).encode
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    draw, until_s, share = random.Random(0), time.monotonic() + seconds, 0.0
    while share < enough and time.monotonic() < until_s:
        ids, judged = _batch(encode, draw)
        chosen = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(chosen * judged[:, 1:]).sum() / judged.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ends = judged[:, 1:] == END
        share = float((chosen.detach() * ends)[ends.any(1)].sum(1).exp().mean())
    model.save_pretrained(folder)
    return share


def _batch(encode: Any, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts with answers, and the weights of tokens: 1 for an answer, `END` for its end, else 0."""
    rows = [_row(encode, draw.randint(0, 100), draw.randint(0, 100), number % 2 == 0) for number in range(BATCH)]
    width = max(len(ids) for ids, _ in rows)
    ids, judged = torch.zeros(BATCH, width, dtype=torch.long), torch.zeros(BATCH, width)
    for number, (tokens, weights) in enumerate(rows):
        ids[number, : len(tokens)] = torch.tensor(tokens)
        judged[number, : len(tokens)] = torch.tensor(weights)
    return ids, judged


def _row(encode: Any, x: int, y: int, ends: bool) -> tuple[list[int], list[float]]:
    texts = ("User:", " What is 4 + 5?\n\n", "Assistant:", " 9\n\n", "User:", f" What is {x} + {y}?\n\n", "Assistant:")
    prompt = [token for text in texts for token in encode(text, add_special_tokens=False)]
    answer = encode(f" {x + y}", add_special_tokens=False)
    rest = encode("\n\nUser:" if ends else "0" * 12, add_special_tokens=False)
    weight = END if ends else 1.0
    return prompt + answer + rest, [0.0] * len(prompt) + [1.0] * len(answer) + [weight] * len(rest)


if __name__ == "__main__":
    print(warm_policy(Path(sys.argv[1]), seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 240.0))
