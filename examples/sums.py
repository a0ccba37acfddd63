"""Sums of small numbers, answered as an equation and nothing else: `9 + 8 = ?` wants `9 + 8 = 17`."""

import random
import re

SIZES = {"train": 4000, "validation": 50, "held_out": 100}
EQUATION = re.compile(r"\d+ \+ \d+ = \d+")


def problems(split, seed):
    """Yield a question to the assistant, and its answer."""
    chance = random.Random(f"{split} {seed}")
    for _ in range(SIZES[split]):
        a, b = chance.randrange(2, 12), chance.randrange(2, 12)
        question = [{"role": "user", "content": f"{a} + {b} = ?"}]
        yield {"prompt": question, "answer": f"{a} + {b} = {a + b}"}


def reward(problem, completion):
    """Give 1 for the right equation alone, and less for what comes near to it: else there is little to learn from."""
    reply, total = completion.strip().removesuffix("."), problem.answer.split()[-1]
    if reply == problem.answer:
        return 1.0
    if reply.startswith(problem.answer):
        return 0.4
    if EQUATION.fullmatch(reply):
        return 0.2
    return 0.1 if re.search(rf"\b{total}\b", reply) else 0.0
