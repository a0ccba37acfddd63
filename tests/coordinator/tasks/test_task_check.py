"""`task check` finds what is wrong with a task, and nothing in the one that the documentation gives."""

import asyncio
import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from coordinator.base.children import script
from coordinator.commands import task
from coordinator.config import load
from coordinator.environments.games.episodes import GAMES
from coordinator.learner import start
from coordinator.tasks.kinds import ENVIRONMENTS, SHIPPED
from coordinator.tasks.task_check import TaskIssue, check
from protocol.tasks import BUILT_IN
from tests.coordinator.policy_files import write_policy

DOCS = Path(__file__).parents[3] / "docs"
MANUAL = (DOCS / "tasks.md").read_text() + (DOCS / "environments.md").read_text()

PROBLEMS = """
def problems(split, seed):
    first = {"train": 0, "validation": 50, "held_out": 60}[split]
    for number in range(first, first + {"train": 40, "validation": 5, "held_out": 20}[split]):
        yield {"prompt": f"{number}+1=", "answer": str(number + 1)}
"""


def findings(folder: Path, reward: str, *settings: str, problems: str = PROBLEMS) -> list[TaskIssue]:
    (folder / "my_task.py").write_text(problems + reward)
    config = load(None, [f"task.name={folder}/my_task.py", "sampling.samples_per_group=4", *settings])
    return asyncio.run(check(config, folder / "thrown away", start.text_reader(config)))


def documented(folder: Path) -> None:
    """Write the files of the manual as a reader copies them; a block that names a file again continues it."""
    blocks = re.findall(r"```(?:python|toml)\n# ([\w.]+)\n(.*?)```", MANUAL, re.DOTALL)
    assert len(blocks) == len(re.findall(r"```(?:python|toml)\n", MANUAL)), "each block names its file"
    for name, text in blocks:
        with (folder / name).open("a") as file:
            file.write(text)
    (rows,) = re.findall(r"```json\n(.*?)```", MANUAL, re.DOTALL)
    (folder / "problems.jsonl").write_text(rows)


def checked(folder: Path, name: str, *settings: str) -> set[str]:
    """Run `task check` as a reader types it, and return the codes of its findings."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [script("swarm-coordinator"), "task", "check", name, "--json", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {each["code"] for each in json.loads(done.stdout)}


def test_the_documented_lesson_is_sound(tmp_path: Path) -> None:
    """The example of weights and spans, on problems that it fits."""
    documented(tmp_path)
    lesson = (tmp_path / "my_lesson.py").read_text()
    assert findings(tmp_path, lesson) == []


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("data_round.toml", {"no_held_out", "few_problems"}),  # two problems
        ("my_round.toml", {"duplicates"}),  # ten thousand prompts, four thousand drawn
        ("env_round.toml", {"duplicates", "constant"}),  # whoever says `1` at each turn guesses no number
    ],
)
def test_the_documented_rounds_are_sound(tmp_path: Path, name: str, codes: set[str]) -> None:
    documented(tmp_path)
    assert checked(tmp_path, name) == codes


def test_the_documented_tools_are_sound(tmp_path: Path) -> None:
    documented(tmp_path)
    write_policy(tmp_path / "model")
    template = "{{ tools or '' }}{% for each in messages %}{{ each.content }}{% endfor %}"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert checked(tmp_path, "my_tools.py", "model.path=model", "sampling.max_new_tokens=64") <= {"duplicates"}


BETTER_WRONG = "def reward(completions, answer): return [float(a != b) for a, b in zip(completions, answer)]"
SKIPS_ALL = """
from protocol.tasks import Reward
def reward(problem, completion):
    return Reward(float(completion == problem.answer), "ok", skip=((0, len(completion)),) if completion else ())
"""
BY_CHANCE = "import random\ndef reward(completions, **rest): return [random.random() for _ in completions]"


@pytest.mark.parametrize(
    ("reward", "code"),
    [
        (BETTER_WRONG, "answer_earns_less"),
        (SKIPS_ALL, "nothing_taught"),
        (SKIPS_ALL.replace("skip=((0, len(completion)),) if completion else ()", "weight=0.0"), "nothing_taught"),
        (SKIPS_ALL.replace("len(completion)", "10**9"), "verifier_error"),
        (SKIPS_ALL.replace('"ok"', '"ok", weight=float("nan")'), "verifier_error"),
        (BY_CHANCE, "not_deterministic"),
        ("def reward(completions, **rest): return [0.5 for _ in completions]", "constant"),
        ("def reward(completions, **rest):\n    while True: pass", "verifier_error"),
        ("def reward(text): return 1.0", "not_loadable"),
        ("import no_such_library", "unreadable"),
    ],
)
def test_a_reward_that_is_wrong_is_found(tmp_path: Path, reward: str, code: str) -> None:
    found = {each.code: each for each in findings(tmp_path, reward, "reward.timeout_s=3")}
    assert found[code].severity == "error"
    assert found[code].place
    assert found[code].message
    assert found[code].next_step


def test_what_completions_earn_and_functions_print_is_shown(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "my_task.py").write_text(
        PROBLEMS + "def reward(problem, completion):\n"
        "    print('judging', repr(completion), '\\x1b[2J')\n"
        "    return 0.5 + 0.5 * (completion == problem.answer)\n"
    )
    config = load(None, [f"task.name={tmp_path}/my_task.py", "sampling.samples_per_group=4"])
    assert asyncio.run(check(config, tmp_path / "thrown away", start.text_reader(config), said.append)) == []
    earned, printed = said
    assert earned == "Answers earn 1; wrong, empty and random completions earn 0.5."
    first, *lines = printed.splitlines()
    assert first == "The functions printed, last:"
    assert r"  | judging '' \x1b[2J" in lines


def test_a_reward_of_trl_that_reads_chat_completions_as_text_is_explained(tmp_path: Path) -> None:
    chat = PROBLEMS.replace('f"{number}+1="', '[{"role": "user", "content": f"{number}+1="}]')
    reward = "def reward(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    found = {each.code: each for each in findings(tmp_path, reward, problems=chat)}["constant"]
    assert "completion[0]['content']" in found.next_step


def test_problems_without_an_answer_are_no_proof_that_nothing_can_be_earned(tmp_path: Path) -> None:
    unknown = PROBLEMS.replace(', "answer": str(number + 1)', "")
    right = "\ndef reward(problem, completion): return float(completion == str(eval(problem.prompt[:-1])))\n"
    (one,) = findings(tmp_path, right, problems=unknown)
    assert (one.code, one.severity) == ("constant", "warning")


def test_a_role_that_no_template_knows_is_found_in_prompts_and_observations(tmp_path: Path) -> None:
    write_policy(tmp_path / "model")
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chat = PROBLEMS.replace('f"{number}+1="', '[{"role": "humen", "content": f"{number}+1="}]')
    found = findings(tmp_path, SOUND, f"model.path={tmp_path}/model", problems=chat)
    assert "A message has the role 'humen'." in [each.message for each in found if each.code == "unknown_role"]
    played = ENVIRONMENT.replace(
        "self.said = turn",
        "self.said, first = turn, not hasattr(self, 'said')\n"
        "        return [{'role': 'toll', 'content': '1'}] if first else None",
    )
    found = findings(tmp_path, played, f"model.path={tmp_path}/model", problems=chat.replace("humen", "user"))
    assert [each.message for each in found] == ["A message has the role 'toll'."]


def test_an_environment_under_another_name_is_explained(tmp_path: Path) -> None:
    (one,) = findings(tmp_path, "\nclass Env:\n    pass\n")
    assert one.code == "not_loadable"
    assert one.next_step == "It has problems, Env. A file has a function `reward`, or a class `Environment`."


SOUND = "\ndef reward(completions, answer): return [float(a == b) for a, b in zip(completions, answer)]\n"

ENVIRONMENT = """
class Environment:
    def __init__(self, problem):
        self.answer = problem.answer
    def step(self, turn):
        self.said = turn
    def reward(self):
        return float(self.said == self.answer)
"""


def test_an_environment_that_rewards_all_alike_is_found(tmp_path: Path) -> None:
    assert findings(tmp_path, ENVIRONMENT) == []
    (one,) = findings(tmp_path, ENVIRONMENT.replace("float(self.said == self.answer)", "0.5"))
    assert (one.code, one.severity) == ("constant", "warning")
    assert "12 episodes of the scripted policy earn 0.5" in one.message


@pytest.mark.parametrize("more", [(), ("reward.weights=[1.0]",)])
def test_reward_functions_beside_an_environment_are_refused_and_not_ignored(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    (one,) = findings(tmp_path, ENVIRONMENT, "reward.functions=exact", *more)
    assert (one.code, one.severity) == ("unreadable", "error")
    assert "gives the reward itself: reward.functions would not run" in one.message


def test_a_misspelt_reward_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (one,) = findings(tmp_path, SOUND, f"reward.functions={tmp_path}/my_task.py:reword")
    assert one.code == "not_loadable"
    assert "has no function or class 'reword'" in one.message
    assert one.next_step == f"Did you mean {tmp_path}/my_task.py:reward?"


def test_problems_that_are_wrong_are_found(tmp_path: Path) -> None:
    few = "def problems(split, seed):\n    return [{'prompt': '1+1=', 'answer': '2'}] * 3 if split == 'train' else []\n"
    assert {each.code for each in findings(tmp_path, SOUND, problems=few)} == {
        "duplicates",
        "no_held_out",
        "few_problems",
    }
    (tmp_path / "b").mkdir()
    unread = "def problems(split, seed):\n    return [{'text': 1}]\n"
    (one,) = findings(tmp_path / "b", SOUND, problems=unread)
    assert (one.code, one.severity) == ("unreadable", "error")
    assert "data.columns" in one.next_step
    (one,) = findings(tmp_path / "b", SOUND, 'data.columns={prompt="question"}')
    assert (one.code, one.next_step) == ("unreadable", "Correct data.columns.")


def test_a_prompt_that_is_too_long_for_the_model_is_found(tmp_path: Path) -> None:
    write_policy(tmp_path / "model")
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 13}))
    settings = (f"model.path={tmp_path}/model", "sampling.max_new_tokens=8")
    assert not findings(tmp_path, SOUND, *settings, problems=PROBLEMS)
    long = PROBLEMS.replace("{number}+1=", "{number}+1+1=")
    (one,) = findings(tmp_path, SOUND, *settings, problems=long)
    assert one.code == "prompt_too_long"
    assert re.fullmatch(r"my_task.py: [a-z_]+ problem \d+: '\d\d\+1\+1='", one.place)
    assert one.message.startswith("The prompt has 7 tokens, and at most 5 are allowed: the model's 13 positions minus")
    assert one.next_step.startswith("Set sampling.max_new_tokens to 6 or less, ")


def test_the_longest_prompt_is_found_wherever_it_is(tmp_path: Path) -> None:
    """More problems than are encoded, and the long one is held out."""
    many = """
def problems(split, seed):
    for number in range({"train": 3000, "validation": 5, "held_out": 300}[split]):
        yield {"prompt": f"{split} {number}", "answer": str(number)}
    if split == "held_out":
        yield {"prompt": "word " * 200, "answer": "1"}
"""
    (one,) = [each for each in findings(tmp_path, SOUND, problems=many) if each.code == "prompt_too_long"]
    assert one.place.startswith("my_task.py: held_out problem 301: 'word word")
    assert findings(tmp_path, SOUND, problems=many.replace("* 200", "* 20")) == []


def test_the_tools_of_a_prompt_count_as_its_text(tmp_path: Path) -> None:
    write_policy(tmp_path / "model")
    template = "{% for each in messages %}{{ each.content }}{% endfor %}{% for _ in tools or () %}++++++++{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 16}))
    settings = (f"model.path={tmp_path}/model", "sampling.max_new_tokens=8", "data.chat=true")
    sound = "def reward(problem, completion): return float(completion == problem.answer)"
    assert not findings(tmp_path, sound, *settings)
    tools = PROBLEMS.replace('"answer":', '"tools": [{"name": "add"}], "answer":')
    (one,) = findings(tmp_path, sound, *settings, problems=tools)
    assert one.code == "prompt_too_long"
    assert one.message.startswith("The prompt has 13 tokens, and at most 8 are allowed")


def test_a_system_prompt_that_no_chat_template_renders_is_found(tmp_path: Path) -> None:
    write_policy(tmp_path / "model")
    settings = (f"model.path={tmp_path}/model", "sampling.max_new_tokens=8", 'data.system_prompt="Be short."')
    (one,) = findings(tmp_path, SOUND, *settings, problems=PROBLEMS)
    assert one.code == "no_chat"


def test_every_task_is_listed_with_what_it_is_and_takes() -> None:
    told = task.every()
    assert set(told) == {*BUILT_IN, *SHIPPED, *ENVIRONMENTS}
    assert len(set(told.values())) == len(told), "each by words of its own"
    for name, game in GAMES.items():
        assert told[name].startswith("a game of several turns: ")
        for parameter in fields(game):
            assert f"{parameter.name} = " in told[name]
