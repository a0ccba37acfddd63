"""Sums of small numbers, answered as an equation and nothing else: `Add 9 and 8.` wants `9 + 8 = 17`."""

import random
import re

PAIRS = [(a, b) for a in range(2, 13) for b in range(2, 10)]
SPLITS = {"held_out": slice(0, 24), "validation": slice(24, 28), "train": slice(28, None)}
EQUATION = re.compile(r"\d+ \+ \d+ = \d+")


def problems(split, seed):
    """Yield a question to the assistant, and its answer; no question is in two splits."""
    for a, b in random.Random(0).sample(PAIRS, len(PAIRS))[SPLITS[split]]:
        question = [{"role": "user", "content": f"Add {a} and {b}."}]
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
