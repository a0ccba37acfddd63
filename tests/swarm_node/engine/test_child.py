"""The engine child from outside: what it puts on standard output, and when it goes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Command,
    CommandFailed,
    Generate,
    GroupFailed,
    LoadVersion,
    Ready,
    SampleRequest,
    frame,
)

DEADLINE_S = 120.0


@pytest.fixture(scope="module", params=["llama", "torch"])
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    command = ENGINES[request.param].command(EngineOptions())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert answer_of(process) == Answer(body=Ready())
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0, "the child does not leave when its input ends"


def answer_of(process: subprocess.Popen[bytes]) -> Answer:
    assert process.stdout is not None
    size_bytes = int.from_bytes(process.stdout.read(LENGTH_BYTES))
    return Answer.from_bytes(process.stdout.read(size_bytes))


def tell(process: subprocess.Popen[bytes], data: bytes) -> Answer:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()
    return answer_of(process)


def test_a_request_before_any_policy_fails_with_its_code(child: subprocess.Popen[bytes]) -> None:
    request = SampleRequest(
        request_id="a",
        version=1,
        prompt=b"\x13\x00\x00\x00",
        seed=1,
        samples=1,
        max_new_tokens=1,
        temperature=1.0,
    )
    failed = tell(child, frame(Command(body=Generate(requests=(request,))))).body
    assert isinstance(failed, GroupFailed)
    assert (failed.request_id, failed.code) == ("a", "engine_failed")
    assert "No policy is loaded" in failed.message


def test_a_signal_to_the_whole_service_leaves_the_child_to_its_agent(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGINT)
    assert isinstance(tell(child, frame(Command(body=LoadVersion(folder="/nowhere", version=1)))).body, CommandFailed)


def test_a_folder_that_is_no_policy_fails_and_the_child_lives_on(child: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        failed = tell(child, frame(Command(body=LoadVersion(folder="/nowhere", version=1)))).body
        assert isinstance(failed, CommandFailed)
        assert failed.code == "engine_failed"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "malformed_message"),
        (b"\xc1", "not_canonical"),
        (b"\x80", "malformed_message"),
        (b"\x81\xa4body\x01", "malformed_message"),
    ],
)
def test_a_frame_that_is_no_command_is_answered_with_an_error(
    child: subprocess.Popen[bytes], body: bytes, code: str
) -> None:
    failed = tell(child, len(body).to_bytes(LENGTH_BYTES) + body).body
    assert isinstance(failed, CommandFailed)
    assert failed.code == code


def test_nothing_but_frames_reaches_standard_output() -> None:
    program = (
        "import os, subprocess\n"
        "from swarm_node.engine.child import claim_stdout\n"
        "pipe = claim_stdout()\n"
        "print('a library greets', flush=True)\n"
        "os.write(1, b'a C library greets')\n"
        "subprocess.run(['echo', 'a program greets'], check=True)\n"
        "pipe.write(b'frame')\n"
        "pipe.flush()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == b"frame"
    assert done.stderr.count(b"greets") == 3


def test_a_library_that_is_broken_is_named_and_the_child_ends(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise RuntimeError('libggml.so: cannot open shared object file')")
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        ENGINES["llama"].command(EngineOptions()),
        env={**os.environ, "PYTHONPATH": places},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        failed = answer_of(process).body
        assert process.wait(DEADLINE_S) == 1
    assert isinstance(failed, CommandFailed)
    assert "llama cannot start: libggml.so" in failed.message
    assert "--engine" in failed.hint


def test_transformers_fetches_nothing_in_a_child_of_ours() -> None:
    """Transformers fetches nothing, whatever a policy's configuration asks it for."""
    code = """
import swarm_node.engine.child as child
child.stay_offline()
import transformers.integrations.hub_kernels as kernels
import huggingface_hub.constants as hub
print(kernels._kernels_enabled, hub.HF_HUB_OFFLINE)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
