"""TRL's GRPOTrainer, with samples of the swarm instead of vLLM. See docs/trainers.md.

Launch, join, export and key are as in plain_loop.py; then, with `pip install trl`:
python examples/trainers/trl_grpo.py http://127.0.0.1:8700 KEY policy [STEPS]
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from echo_swarm import Swarm
from echo_swarm.trl import SwarmRollouts

STEPS, PROMPTS, SAMPLES = 30, 16, 16


def is_right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward a sum that is right."""
    return [float(said == right) for said, right in zip(completions, answer, strict=True)]


def main(
    url: str,
    key: str,
    folder: str,
    output: str = "runs/trl",
    steps: int = STEPS,
    reward: Callable[..., list[float]] = is_right,
) -> None:
    """Train the policy of `folder` on sums."""
    draw = random.Random(0)
    sums = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(steps * PROMPTS)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    settings = GRPOConfig(
        output_dir=output,
        max_steps=steps,
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    with Swarm(url, key) as swarm:
        trainer = GRPOTrainer(
            model=folder,
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            rollout_func=SwarmRollouts(swarm),
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], steps=int(sys.argv[4]) if len(sys.argv) > 4 else STEPS)
