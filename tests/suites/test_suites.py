"""Each suite's own command against a real round, and its results imported: the figures are the same everywhere.

- Half of the expected answers are those that the policy gives at temperature 0, so each suite must measure one half.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.learner.embedded import EmbeddedShape, make_policy
from tests.processes.conftest import swarm
from tests.processes.programs import Swarm, said, until
from tests.processes.rounds import Coordinator, Settings, join

__all__ = ["swarm"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("lm_eval", "inspect_ai", "lighteval")),
        reason="the suites are not installed here; make test-suites has them",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "suites"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
SETTINGS: Settings = {"sampling": {"max_new_tokens": 4}, "learner": {"external": True}}
PROBLEMS = 8
PATIENCE_S = 600.0
"""The limit of a suite: its imports alone may take a minute on a busy machine."""


@dataclass(frozen=True)
class MeasuredRound:
    """A round with one node, a key to its endpoint, and problems of which the policy solves half."""

    coordinator: Coordinator
    swarm: Swarm
    key: str
    policy: Path

    @property
    def url(self) -> str:
        return f"{self.coordinator.url}/v1"

    def command(self, *words: str) -> str:
        """Run `swarm-coordinator eval` with the round's file after its first word."""
        first, *rest = words
        return said(self.swarm, "swarm-coordinator", "eval", first, str(self.coordinator.config_file), *rest)

    def folder(self, name: str) -> Path:
        made = self.swarm.folder / name
        made.mkdir(exist_ok=True)
        return made


@pytest.fixture(scope="module")
def measured(swarm: Swarm) -> MeasuredRound:
    policy = swarm.folder / "policy"
    make_policy(policy, seed=1, shape=EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=32))
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    coordinator = Coordinator(swarm, {**SETTINGS, "model": {"path": str(policy)}}).start(learner=True)
    coordinator.reaches("version", 1)
    join(swarm, "node", coordinator.join_string, "--engine", "torch")
    words = ("api-keys", "create", str(coordinator.config_file), "suites", "--budget", "100000000")
    made = MeasuredRound(coordinator, swarm, said(swarm, "swarm-coordinator", *words).split()[1], policy)
    until("the node to hold version 1", lambda: "swarm@1" in str(asked(made, "GET", "/models")))
    return made


def asked(measured: MeasuredRound, method: str, path: str, **body: Any) -> Any:
    """Return the endpoint's answer to a request."""
    headers = {"Authorization": f"Bearer {measured.key}"}
    answer = httpx.request(method, measured.url + path, json=body or None, headers=headers, timeout=120)
    assert answer.is_success, answer.text
    return answer.json()


def answered(measured: MeasuredRound, prompts: Sequence[str], is_chat: bool) -> list[str]:
    """Return what the policy answers at temperature 0."""
    common = {"model": "swarm@1", "temperature": 0, "stop": ["\n"], "max_tokens": 4}
    if not is_chat:
        found = asked(measured, "POST", "/completions", prompt=list(prompts), **common)
        return [choice["text"] for choice in found["choices"]]
    chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
    found = [asked(measured, "POST", "/chat/completions", messages=chat, **common) for chat in chats]
    return [answer["choices"][0]["message"]["content"] for answer in found]


def problems(measured: MeasuredRound, is_chat: bool) -> Path:
    """Write problems to a folder of their own: the policy solves every second one."""
    folder = measured.folder("chat-problems" if is_chat else "problems")
    prompts = [f"{number}+{number + 3}" for number in range(40, 40 + 4 * PROBLEMS)]
    every = zip(prompts, answered(measured, prompts, is_chat), strict=True)
    known = [(prompt, answer) for prompt, answer in every if re.fullmatch(r"[A-Za-z0-9]+", answer)][:PROBLEMS]
    assert len(known) == PROBLEMS, "an untrained policy mostly repeats the last token, a digit"
    lines = [{"input": prompt, "target": answer if place % 2 else "no"} for place, (prompt, answer) in enumerate(known)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(measured: MeasuredRound, folder: Path, *command: str, code: int | None = 0, **env: str) -> str:
    """Run a suite's own command in a folder; return what it printed."""
    home = str(measured.folder("home"))
    offline = {"HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_COLOR": "1"}
    own = {"OPENAI_API_KEY": measured.key, "SWARM_API_KEY": measured.key, "SWARM_BASE_URL": measured.url}
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=folder,
        env=os.environ | offline | own | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"} | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    told = done.stdout + done.stderr
    assert code is None or done.returncode == code, told[-6000:]
    return told


def lm_eval_task(folder: Path) -> None:
    """Write the example's task for other problems."""
    text = (TASKS / "sums.yaml").read_text()
    (folder / "sums.yaml").write_text(text.replace("examples/suites/sums.jsonl", str(folder / "sums.jsonl")))


def lm_eval(measured: MeasuredRound, folder: Path, model: str, path: str, *more: str, **arguments: str) -> str:
    """Run lm-eval; its results are in `out` below the folder."""
    given = {"model": "swarm@1", "base_url": measured.url + path} | arguments
    listed = ",".join(f"{name}={value}" for name, value in given.items())
    words = ("lm_eval", "run", "--model", model, "--model_args", listed, "--output_path", str(folder / "out"))
    return run(measured, folder, *words, "--include_path", str(folder), *more)


def with_text(measured: MeasuredRound) -> Path:
    folder = problems(measured, is_chat=False)
    lm_eval_task(folder)
    text = {"tokenizer_backend": "None", "tokenized_requests": "False"}
    lm_eval(measured, folder, "local-completions", "/completions", "--tasks", "sums", **text)
    return folder / "out"


def with_tokens(measured: MeasuredRound) -> Path:
    folder = problems(measured, is_chat=False)
    lm_eval_task(folder)
    tokens = {"tokenizer": str(measured.policy), "tokenizer_backend": "huggingface", "num_concurrent": "4"}
    lm_eval(measured, folder, "local-completions", "/completions", "--tasks", "sums", **tokens)
    return folder / "out"


def with_chat(measured: MeasuredRound) -> Path:
    folder = problems(measured, is_chat=True)
    lm_eval_task(folder)
    words = ("--tasks", "sums", "--apply_chat_template")
    lm_eval(measured, folder, "local-chat-completions", "/chat/completions", *words)
    return folder / "out"


def with_inspect(measured: MeasuredRound, *more: str) -> Path:
    folder = problems(measured, is_chat=True)
    shutil.copy(TASKS / "sums_inspect.py", folder)  # inspect-ai finds tasks below its working directory only
    words = ("inspect", "eval", "sums_inspect.py", "--model", "openai-api/swarm/swarm@1", "--temperature", "0")
    run(measured, folder, *words, "--max-tokens", "16", "--stop-seqs", "\n", "--display", "plain", *more)
    return folder / "logs"


def with_lighteval(measured: MeasuredRound) -> Path:
    folder, data = problems(measured, is_chat=True), measured.folder("lighteval-problems")
    (folder / "sums.jsonl").replace(data / "sums.jsonl")
    model = f"model_name=openai/swarm@1,base_url={measured.url}"
    words = ("lighteval", "endpoint", "litellm", model, "sums|0", "--custom-tasks", str(TASKS / "sums_lighteval.py"))
    run(measured, folder, *words, "--output-dir", str(folder / "out"), SUMS=str(data))
    return folder / "out"


RUNS: Mapping[str, tuple[Callable[[MeasuredRound], Path], str]] = {
    "lm-eval with text": (with_text, "exact_match"),
    "lm-eval with tokens": (with_tokens, "exact_match"),
    "lm-eval with a chat": (with_chat, "exact_match"),
    "inspect-ai": (with_inspect, "mean (exact)"),
    "lighteval": (with_lighteval, "em"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_suite_measures_a_version_and_its_results_are_shown(measured: MeasuredRound, kind: str) -> None:
    measure, metric = RUNS[kind]
    folder = measure(measured)
    (imported,) = [made for made in json.loads(measured.command("import", str(folder), "--json")) if made["is_new"]]
    assert (imported["suite"], imported["version"], imported["update"]) == (kind.split()[0], 1, 0)
    (result,) = [found for found in imported["results"] if found["metric"] == metric]
    assert (result["task"].partition("|")[0], result["value"]) == ("sums", 0.5)
    assert result["samples"] == (None if kind == "lighteval" else PROBLEMS), "lighteval does not write it"
    assert 0.1 < result["stderr"] < 0.3
    again = json.loads(measured.command("import", str(folder), "--json"))
    assert not any(made["is_new"] for made in again)
    listed = measured.coordinator.fresh("/v1/evaluations")["suites"]
    assert imported["results"] in [run["results"] for run in listed]
    page = httpx.get(f"{measured.coordinator.url}/training").text
    assert f"{imported['suite']} {imported['release']}".strip() in page
    assert f"0.5 ± {result['stderr']:.2g}" in page


def test_a_task_of_likelihoods_fails_by_name(measured: MeasuredRound) -> None:
    folder = measured.folder("likelihoods")
    (folder / "sums.jsonl").write_text('{"input": "1+2=3", "target": "yes"}\n')
    lm_eval_task(folder)
    task = (folder / "sums.yaml").read_text().replace("generate_until", "multiple_choice")
    task = re.sub(r"generation_kwargs:\n(  .*\n)+", 'doc_to_choice: ["yes", "no"]\n', task).replace(
        "exact_match", "acc"
    )
    (folder / "sums.yaml").write_text(task)
    tokens = {"tokenizer": str(measured.policy), "tokenizer_backend": "huggingface", "max_retries": "1"}
    given = {"model": "swarm@1", "base_url": f"{measured.url}/completions"} | tokens
    listed = ",".join(f"{name}={value}" for name, value in given.items())
    words = ("lm_eval", "run", "--model", "local-completions", "--model_args", listed, "--tasks", "sums")
    told = run(measured, folder, *words, "--include_path", str(folder), code=None)
    assert "echo is true" in told
    assert "compare the likelihoods" in told
