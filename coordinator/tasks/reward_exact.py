"""The built-in reward `exact`: 1 if the completion equals the answer, except for white space around it."""

from protocol.tasks import Problem, Reward


def reward(problem: Problem, completion: str) -> Reward:
    return Reward(float(completion.strip() == problem.answer.strip()), "ok")
