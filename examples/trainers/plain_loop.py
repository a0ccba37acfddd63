"""GRPO in one file: the swarm samples sums, this loop trains and publishes. See docs/trainers.md.

swarm-coordinator launch examples/trainer.toml                              # one terminal
swarm-node join JOIN_STRING                                                 # another: on any number of machines
swarm-coordinator export examples/trainer.toml policy                       # the starting policy, as a folder
swarm-coordinator api-keys create examples/trainer.toml me --budget 100000000 --publishes
python examples/trainers/plain_loop.py http://127.0.0.1:8700 KEY policy
"""

import random
import sys

import torch
from transformers import AutoModelForCausalLM

from echo_swarm import Rollout, Swarm

STEPS, PROMPTS, SAMPLES, RATE, CLIP = 60, 32, 16, 2e-4, 0.2
SHOWN = 10  # sums differ in difficulty, so the reward of one step says little


def main(url: str, key: str, folder: str, steps: int = STEPS) -> None:
    """Train the policy of `folder` on sums, and print the mean reward of each step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    draw, seen = random.Random(0), list[float]()
    with Swarm(url, key) as swarm:
        for step in range(1, steps + 1):
            sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(PROMPTS)]
            rollouts = swarm.sample([f"{a}+{b}=" for a, b in sums], n=SAMPLES)
            answers = [str(a + b) for a, b in sums]
            rewards = torch.tensor(
                [[float(sample.text == answer) for sample in rollout.samples]
                 for rollout, answer in zip(rollouts, answers, strict=True)]
            )  # fmt: skip
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            optimizer.zero_grad()
            torch.autograd.backward(loss(model, rollouts, advantages))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            version = swarm.publish(model)
            seen.append(float(rewards.mean()))
            lately = sum(seen[-SHOWN:]) / len(seen[-SHOWN:])
            print(f"step {step} reward {seen[-1]:.3f}, of the last {SHOWN} {lately:.3f}, version {version}", flush=True)


def loss(model: torch.nn.Module, rollouts: list[Rollout], advantages: torch.Tensor) -> torch.Tensor:
    """Return the clipped objective; the nodes' log-probabilities are those of the policy that sampled."""
    rows = [(rollout.prompt_token_ids, sample) for rollout in rollouts for sample in rollout.samples]
    longest = max(len(prompt) + len(sample.token_ids) for prompt, sample in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    before, is_drawn = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
    for row, (prompt, sample) in enumerate(rows):
        drawn = slice(len(prompt), len(prompt) + len(sample.token_ids))
        ids[row, : drawn.stop] = torch.tensor([*prompt, *sample.token_ids])
        before[row, drawn], is_drawn[row, drawn] = torch.tensor(sample.logprobs), 1.0
    logits = model(ids).logits[:, :-1]
    now = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (now - before[:, 1:]).exp()
    advantage = advantages.reshape(-1, 1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain * is_drawn[:, 1:]).sum() / is_drawn.sum()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
