"""A launched round tells its operator's webhook of an alarm once, though it is killed, and of its end."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, operator_of

pytestmark = pytest.mark.processes


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Receive messages, in a thread."""
    got: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the library's name
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_words: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_alarm_is_sent_once_though_the_coordinator_is_killed(swarm: Swarm, policy: Path) -> None:
    with webhook() as (url, got):
        coordinator = Coordinator(swarm, {"notify": {"webhook": url, "hold_s": 0.0}}).start()
        operator_of(swarm, coordinator, policy).publish()
        until("the alarm", lambda: [each for each in got if each["code"] == "learner_waits"])
        coordinator.program.kill()
        coordinator.start()
        node = LightNode(coordinator.join_string)
        node.register()

        def ends() -> list[dict[str, Any]]:
            node.beat()  # it would count as offline after a while
            return [each for each in got if each["state"] == "ends"]

        until("its end", ends)
        node.close()
    about = [(each["state"], each["id"]) for each in got if each["code"] == "learner_waits"]
    assert [state for state, _ in about][:2] == ["begins", "ends"]
    assert len({name for _, name in about}) == len(about)
    assert "No node is connected" in next(each["text"] for each in got if each["code"] == "learner_waits")
