"""A real server of OpenEnv, in a process of its own, and this client of its protocol."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.environments import openenv_server
from protocol.errors import ConfigInvalid
from tests.environments.playing import call, play, problems
from tests.environments.serving import DOWN

LIBRARY = Path(__file__).parents[2] / ".venv-environments" / "openenv"

needs_library = [
    pytest.mark.skipif(not LIBRARY.is_dir(), reason="OpenEnv is not installed here; make test-environments has it"),
    pytest.mark.processes,
]


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Yield the address of a server; it listens before its program starts, so nothing waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        program = [sys.executable, str(Path(__file__).with_name("openenv_app.py")), kind, str(listening.fileno())]
        environment = os.environ | {"PYTHONPATH": str(LIBRARY), "PYTHONWARNINGS": "default"}
        with subprocess.Popen(program, pass_fds=[listening.fileno()], env=environment) as process:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.kill()


@pytest.fixture(scope="module")
def words() -> Iterator[dict[str, Any]]:
    with server("words") as url:
        yield {"url": url, "text": "prompt", "prompt": "A game."}


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, Any]]:
    with server("tools") as url:
        yield {"url": url, "resets": [{"seed": number} for number in range(30)]}


class TestWords:
    """An environment whose actions have one field."""

    pytestmark = needs_library

    def test_episodes_are_played_to_their_end(self, words: dict[str, Any]) -> None:
        games = problems(openenv_server, size=12, **words)
        assert {game.prompt[0][1] for game in games} == {
            f"A game.\n\nGuess a fruit of {letters} letters." for letters in (4, 5)
        }
        apple = next(game for game in games if "5 letters" in game.prompt[0][1])
        four = next(game for game in games if "4 letters" in game.prompt[0][1])

        won = play(openenv_server, apple, ["pear", '{"word": "apple"}'], **words)
        assert won.read == ["It is not pear.", None]
        assert won.score == pytest.approx(0.8)
        assert play(openenv_server, apple, ["pear", "apple"], **words, reward="last").score == pytest.approx(0.9)
        assert play(openenv_server, four, ["fig", "lime"], **words).score == pytest.approx(-0.2)  # cut off

    def test_a_bad_action_is_answered_with_its_error(self, words: dict[str, Any]) -> None:
        first, *_ = problems(openenv_server, **words)
        played = play(openenv_server, first, ['{"colour": "red"}', "two words", "fig"], **words)
        assert "Invalid message" in played.read[0]
        assert played.read[1:] == ["Error: a guess has only letters", "It is not fig."]
        assert played.earned["refused"] == 2.0

    def test_the_same_turns_are_answered_the_same(self, words: dict[str, Any]) -> None:
        assert problems(openenv_server, **words) == problems(openenv_server, **words)
        for problem in problems(openenv_server, **words):
            turns = ["plum", "?", "pear"]
            assert play(openenv_server, problem, turns, **words) == play(openenv_server, problem, turns, **words)

    def test_the_whole_observation_is_read_without_a_field(self, words: dict[str, Any]) -> None:
        whole = {"url": words["url"], "action": "word"}
        first, *_ = problems(openenv_server, **whole)
        assert play(openenv_server, first, ["fig"], **whole).read == ['{"prompt": "It is not fig.", "tries": 1}']
        with pytest.raises(ConfigInvalid, match="no field 'colour'") as caught:
            problems(openenv_server, **whole, text="colour")
        assert "prompt" in str(caught.value.hint)


class TestTools:
    """An environment whose actions are tool calls."""

    pytestmark = needs_library

    def test_tools_are_listed_and_called(self, tools: dict[str, Any]) -> None:
        first, *_ = problems(openenv_server, **tools)
        assert first.columns["tools"][0]["function"]["parameters"]["required"] == ["by"]
        assert first.prompt == (("user", "{}"),)

        won = play(openenv_server, first, [call("count", by=4), call("count", by=6)], **tools)
        assert won.read == [[{"role": "tool", "name": "count", "content": "4"}], None]
        assert won.score == 1.0
        assert play(openenv_server, first, [call("count", by=4), "I give up."], **tools).score == 0.0

    def test_a_bad_call_is_answered_with_its_error(self, tools: dict[str, Any]) -> None:
        first, *_ = problems(openenv_server, **tools)
        played = play(openenv_server, first, [call("count"), call("leap", by=1), "<tool_call>[]", "."], **tools)
        said = [each[0]["content"] for each in played.read[:2]]
        assert said[0] == "Error: cannot call count"
        assert "leap" in said[1]
        assert played.earned["tool_errors"] == 3.0

    def test_resets_are_split(self, tools: dict[str, Any]) -> None:
        parts = {
            split: [each.columns["reset"]["seed"] for each in problems(openenv_server, split, size=99, **tools)]
            for split in ("train", "validation", "held_out")
        }
        assert parts == {"train": [*range(24)], "validation": [24, 25, 26], "held_out": [27, 28, 29]}


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(ConfigInvalid, match=f"OpenEnv server at {DOWN} does not answer") as caught:
        problems(openenv_server, url=DOWN)
    assert "task.parameters.url" in str(caught.value.hint)


@pytest.mark.processes
@pytest.mark.skipif(not LIBRARY.is_dir(), reason="OpenEnv is not installed here; make test-environments has it")
def test_a_server_that_has_stopped_is_named() -> None:
    with server("words") as url:
        first, *_ = problems(openenv_server, url=url)
    with pytest.raises(ConfigInvalid, match="does not answer"):
        play(openenv_server, first, ["plum"], url=url)
