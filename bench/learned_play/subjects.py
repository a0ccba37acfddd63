"""Environments to learn, each with a careless player: the policy imitates one first, as it knows nothing.

- The players know the form of a turn, and are right in some of their episodes only. The rest is for rewards to teach.
"""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from bench.learned_play.warehouse import GOODS, TOOLS
from bench.learning.subjects import MIDDLE, Subject
from bench.learning.trial import Trial
from coordinator.learner.embedded_text import END, START
from protocol.tasks import Problem

TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message.role }}}}\n{{{{ message.content }}}}{END}\n{{% endfor %}}"
    f"{START}assistant\n"
)
CALL = '<tool_call>\n{"name": "', '", "arguments": {"good": "', '"}}\n</tool_call>'
WORDS = *(f"{role}\n" for role in ("system", "user", "assistant", "tool")), *CALL, *TOOLS, *GOODS
COUNTING = "counting"
STEPS = {"up": 1, "down": -1, "up twice": 2, "down twice": -2}
"""The user's words in `counting.py`."""

CALLS_TIMES, RIGHT_TOOL_TIMES, RIGHT_GOOD_TIMES = 0.75, 0.6, 0.5
"""Chances that the player of the warehouse calls at all, calls the right tool, and asks for the right good."""

RIGHT_DIGIT_TIMES = 0.6
"""Chance that the player who counts on takes care; else the digit is any."""


def asks_carelessly(number: int, problem: Problem, read: Sequence[str]) -> str:
    """Return a call of some tool for some good, then what it returned; or any number at once."""
    chance = random.Random(f"warehouse {number} {len(read)}")
    if read:
        return read[-1]
    if chance.random() > CALLS_TIMES:
        return str(chance.randrange(100, 1000))
    right = problem.columns
    tool = right["tool"] if chance.random() < RIGHT_TOOL_TIMES else chance.choice(TOOLS)
    good = right["good"] if chance.random() < RIGHT_GOOD_TIMES else chance.choice(GOODS)
    before, between, after = CALL
    return f"{before}{tool}{between}{good}{after}"


def counts_carelessly(number: int, problem: Problem, read: Sequence[str]) -> str:
    """Return the right digit, or any."""
    assert not isinstance(problem.prompt, str)
    first, step = problem.prompt[-1].content.split("\n")
    right = int(first) + sum(STEPS[each] for each in (step, *read))
    chance = random.Random(f"counting {number} {len(read)}")
    return str(right % 10 if chance.random() < RIGHT_DIGIT_TIMES else chance.randrange(10))


def _solved(problems: int, samples: int) -> Callable[[Trial], float]:
    return lambda trial: 100 * fmean(reward.score for reward in trial.held_out(problems, samples))


def _settings(name: str, *more: str) -> tuple[str, ...]:
    return (
        f"task.name={name}",
        "reward.network=true",
        "sampling.max_new_tokens=100",
        "sampling.samples_per_group=16",
        "learner.learning_rate=1e-3",
        "learner.warmup_updates=5",
        "learner.groups_per_update=8",
        *more,
    )


SUBJECTS = (
    Subject(
        name="tools",
        example="demo.toml",
        settings=_settings(str(Path(__file__).with_name("warehouse.py")), "episode.turn_tokens_max=10"),
        updates=40,
        every=10,
        figure="held-out questions answered",
        unit="%",
        top=100,
        measure=_solved(200, 1),
        gain_wanted=20,
        shape=MIDDLE,
        words=WORDS,
        template=TEMPLATE,
        begin=lambda trial: trial.imitate_player(asks_carelessly, 200, 4000),
    ),
    Subject(
        name="verifiers",
        example="demo.toml",
        settings=_settings("verifiers", f'task.parameters={{id="{COUNTING}"}}', "episode.turn_tokens_max=3"),
        updates=12,
        every=6,
        figure="held-out conversations without a mistake",
        unit="%",
        top=100,
        measure=_solved(64, 3),
        gain_wanted=20,
        shape=MIDDLE,
        words=(*WORDS, *sorted(STEPS, key=len, reverse=True)),
        template=TEMPLATE,
        begin=lambda trial: trial.imitate_player(counts_carelessly, 300, 1000),
    ),
)


def available() -> tuple[Subject, ...]:
    """Return the subjects whose library is installed here; verifiers then finds our taskset as an installed one."""
    if importlib.util.find_spec("verifiers") is None:
        return tuple(subject for subject in SUBJECTS if subject.name != "verifiers")
    sys.modules[COUNTING] = importlib.import_module(f"bench.learned_play.{COUNTING}")
    return SUBJECTS
