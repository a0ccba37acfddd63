"""Sums for inspect-ai: each problem is one message, and the answer must be the sum."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def sums(data: str = str(Path(__file__).with_name("sums.jsonl"))) -> Task:
    """Return the task; `-T data=FILE` names other problems."""
    return Task(dataset=json_dataset(data), solver=[generate()], scorer=exact())
