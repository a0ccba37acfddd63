"""The built-in reward `exact`: 1 for saying the answer word for word, white space around it aside."""

from protocol.tasks import Problem, Reward


def reward(problem: Problem, completion: str) -> Reward:
    return Reward(float(completion.strip() == problem.answer.strip()), "ok")
