"""Sums for lighteval: each problem is one message, and the answer must be the sum.

`SUMS` names a folder with other problems, as JSONL.
"""

import os
from pathlib import Path
from typing import Any

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(line: dict[str, Any], task_name: str) -> Doc:
    """Return a problem in lighteval's form."""
    return Doc(task_name=task_name, query=line["input"], choices=[line["target"]], gold_index=0)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="sums",
        prompt_function=prompt,
        hf_repo=os.environ.get("SUMS", str(Path(__file__).parent)),
        hf_subset="default",
        hf_avail_splits=["train"],
        evaluation_splits=["train"],
        generation_size=16,
        stop_sequence=["\n"],
        metrics=[Metrics.exact_match],
    )
]
