"""`make demo-real`: a real model learns on a swarm, is exported, and is judged by transformers alone.

- The swarm is `swarm-coordinator demo examples/sums.toml`: a coordinator, an auditor and three nodes, all on this
  machine: torch in float32, torch in bf16, and llama.cpp. `--node` names others.
- Before and after are measured without anything of ours: `generate` of transformers, greedy, on held-out questions.
- The exit status is 0 only if fewer than `BEFORE_MAX` of the answers were right before and more than `AFTER_MIN` after.
"""

import argparse
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tests.processes.programs import script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sums.toml"
TASK = ROOT / "examples" / "sums.py"
NODES = ("--engine torch --dtype float32", "--engine torch --dtype bfloat16", "--engine llama --dtype float32")
NEW_TOKENS, SHOWN = 12, 5
BEFORE_MAX, AFTER_MIN = 0.1, 0.6


@dataclass(frozen=True)
class Answered:
    """A held-out question, its right answer, and what a model says."""

    question: str
    right: str
    reply: str

    @property
    def is_right(self) -> bool:
        return self.reply.removesuffix(".") == self.right


def answers(folder: Path) -> list[Answered]:
    """Ask the model of a folder every held-out question, without anything of ours."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    rows = list(runpy.run_path(str(TASK))["problems"]("held_out", seed=0))
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    outputs = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=model.config.eos_token_id
    )
    replies = tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return [
        Answered(row["prompt"][0]["content"], row["answer"], reply.strip())
        for row, reply in zip(rows, replies, strict=True)
    ]


def share(answered: list[Answered]) -> float:
    """Return the share of right answers."""
    return sum(one.is_right for one in answered) / len(answered)


def show(console: Console, before: list[Answered], after: list[Answered]) -> None:
    """Print some questions with both replies, and both shares."""
    table = Table("question", "before", "after", title="Held-out questions, answered by plain transformers")
    for old, new in list(zip(before, after, strict=True))[:SHOWN]:
        table.add_row(old.question, old.reply, new.reply)
    table.add_section()
    table.add_row("all right answers", f"{share(before):.0%}", f"{share(after):.0%}")
    console.print(table)


def play(model: Path, folder: Path, nodes: Sequence[str], settings: Sequence[str]) -> Path:
    """Run the swarm, export its policy, and return the folder of that."""
    chosen = [part for one in (f"model.path={model}", *settings) for part in ("--set", one)]
    own = [part for one in nodes for part in ("--node", one)]
    demo = [script("swarm-coordinator"), "demo", str(EXAMPLE), "--directory", str(folder), *chosen, *own]
    subprocess.run(demo, check=True, cwd=ROOT)
    placed = ("--set", f"round.directory={folder / 'round'}")
    export = [script("swarm-coordinator"), "export", str(EXAMPLE), str(folder / "policy"), *chosen, *placed]
    subprocess.run(export, check=True, cwd=ROOT)
    return folder / "policy"


def main() -> int:
    """Measure, train, measure again, and judge."""
    parser = argparse.ArgumentParser(prog="make demo-real", description=__doc__)
    parser.add_argument("model", type=Path, help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--directory", type=Path, default=Path("runs/demo-real"), help="where the round's files go")
    parser.add_argument("--node", action="append", default=[], help="options of join for one node; repeatable")
    parser.add_argument("--set", action="append", default=[], help="section.key=value on top of the example")
    options = parser.parse_args()
    console = Console()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    if options.directory.exists():
        console.print(f"{options.directory} is there already. Remove it, or name another folder with --directory.")
        return 2
    before = answers(options.model)
    policy = play(options.model.absolute(), options.directory.absolute(), options.node or NODES, options.set)
    after = answers(policy)
    show(console, before, after)
    met = share(before) < BEFORE_MAX and share(after) > AFTER_MIN
    console.print(f"The policy is in {policy}. RESULT demo-real {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
