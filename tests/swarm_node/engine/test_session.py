"""The engine's conversation, without pipes: which answers the commands get, and in what order."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from protocol.work.rollout import pack_tokens
from swarm_node.engine.engine import Answered, Engine
from swarm_node.engine.messages import (
    CancelRequests,
    Command,
    Encode,
    Encoded,
    Generate,
    LoadVersion,
    Measure,
    Said,
    SampleRequest,
)
from swarm_node.engine.session import Session
from swarm_node.engine.torch.engine import TorchEngine


class Talk:
    """A session, and what it said in few words."""

    def __init__(self, engine: Engine, now: Callable[[], float] = lambda: 0.0) -> None:
        self.said: list[str] = []
        self._session = Session(engine, lambda body: self.said.append(_words(body.model_dump())), now=now)

    def tell(self, *commands: LoadVersion | Generate | CancelRequests | Measure) -> None:
        for command in commands:
            self._session.handle(Command(body=command).to_bytes())

    def go_on(self, steps: int = 1000) -> list[str]:
        """Step until there is nothing left to do, or for so many steps; return what was said since the last time."""
        while steps and not self._session.idle:
            self._session.go_on()
            steps -= 1
        said, self.said = self.said, []
        return said


def _words(body: dict[str, object]) -> str:
    return " ".join(str(body[key]) for key in ("kind", "request_id", "message") if key in body)


def generate(*names: str, version: int = 1, max_new_tokens: int = 1) -> Generate:
    prompt = pack_tokens([19, 20, 31])
    return Generate(
        requests=tuple(
            SampleRequest(
                request_id=name,
                version=version,
                prompt=prompt,
                seed=1,
                samples=4,
                max_new_tokens=max_new_tokens,
                temperature=1.0,
            )
            for name in names
        )
    )


@pytest.fixture
def talk(policy: Path) -> Talk:
    talk = Talk(TorchEngine())
    talk.tell(LoadVersion(folder=str(policy), version=1))
    assert talk.go_on() == ["loaded"]
    return talk


def test_requests_join_those_that_run(talk: Talk) -> None:
    talk.tell(generate("long", max_new_tokens=100))
    assert talk.go_on(3) == []
    talk.tell(generate("short"))
    assert talk.go_on() == ["group_done short", "group_done long"]


def test_a_load_waits_for_what_came_before_it_and_what_comes_after_waits_for_the_load(talk: Talk, policy: Path) -> None:
    talk.tell(generate("long", max_new_tokens=30), LoadVersion(folder=str(policy), version=2))
    talk.tell(generate("new", version=2), Measure(), generate("old"))
    assert talk.go_on() == [
        "group_done long",
        "loaded",
        "group_done new",
        "measured",
        "group_failed old A request for version 1, while version 2 is loaded.",
    ]


def test_cancel_reaches_requests_that_run_and_those_behind_a_waiting_load(talk: Talk, policy: Path) -> None:
    talk.tell(generate("runs", "stays", max_new_tokens=100))
    talk.go_on(2)
    talk.tell(LoadVersion(folder=str(policy), version=2), generate("waits", "next", version=2))
    talk.tell(CancelRequests(request_ids=("runs", "waits", "unknown")))
    assert talk.go_on() == ["cancelled runs", "cancelled waits", "group_done stays", "loaded", "group_done next"]
    talk.tell(CancelRequests(request_ids=("stays", "next")))
    assert talk.go_on() == [], "each request is answered once"


def test_after_a_failed_load_nothing_is_sampled_until_one_succeeds(talk: Talk, policy: Path, tmp_path: Path) -> None:
    talk.tell(LoadVersion(folder=str(tmp_path / "absent"), version=2), generate("old"), generate("new", version=2))
    failed, *others = talk.go_on()
    assert failed.startswith("failed The policy in")
    assert others == [f"group_failed {name} No policy is loaded." for name in ("old", "new")]
    talk.tell(LoadVersion(folder=str(policy), version=2), generate("new", version=2))
    assert talk.go_on() == ["loaded", "group_done new"]


def test_a_failure_in_a_step_is_the_answer_to_every_request_and_the_next_one_works(policy: Path) -> None:
    class Stumbling(TorchEngine):
        def step(self) -> list[Answered]:
            answers = super().step()
            if self.measured().later_tokens < 12:
                return answers
            raise ZeroDivisionError("division by zero")

    talk = Talk(Stumbling())
    talk.tell(LoadVersion(folder=str(policy), version=1), generate("a", "b", "c", max_new_tokens=9))
    assert talk.go_on() == ["loaded", *(f"group_failed {name} ZeroDivisionError: division by zero" for name in "abc")]
    talk.tell(generate("d"))
    assert talk.go_on() == ["group_done d"]


def test_an_engine_is_limited_before_it_loads_and_texts_are_encoded_with_what_it_loaded(policy: Path) -> None:
    limited, said = list[int](), list[Said]()
    session = Session(TorchEngine(), said.append, limited.append)
    for command in (
        Encode(texts=("42",)),
        LoadVersion(folder=str(policy), version=1, memory_max_bytes=7),
        Encode(texts=("42+76=", "4")),
        LoadVersion(folder="/nowhere", version=2),
        Encode(texts=("42",)),
    ):
        session.handle(Command(body=command).to_bytes())
    while not session.idle:
        session.go_on()
    assert limited == [7], "and where nothing is said, nothing is changed"
    assert [one.kind for one in said] == ["failed", "loaded", "encoded", "failed", "failed"]
    encoded = said[2]
    assert isinstance(encoded, Encoded)
    assert [len(prompt) // 4 for prompt in encoded.prompts] == [6, 1]


def test_a_long_group_reports_progress_every_second_of_its_steps(policy: Path) -> None:
    """The agent stopped an engine that was sampling a long text after 300 s without a word."""
    ticks = count()
    talk = Talk(TorchEngine(), now=lambda: 0.4 * next(ticks))
    talk.tell(LoadVersion(folder=str(policy), version=1), generate("long", max_new_tokens=40))
    loaded, *said = talk.go_on()
    assert (loaded, said[-1]) == ("loaded", "group_done long")
    assert set(said[:-1]) == {"progress"}
    assert len(said[:-1]) >= 3


def test_a_step_that_reports_something_needs_no_progress_beside_it(policy: Path) -> None:
    ticks = count()
    talk = Talk(TorchEngine(), now=lambda: 1.0 * next(ticks))
    talk.tell(LoadVersion(folder=str(policy), version=1), generate("short"))
    assert talk.go_on() == ["loaded", "group_done short"]
