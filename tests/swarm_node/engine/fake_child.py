"""An engine child without torch that misbehaves as its argument says; run as a program."""

import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from protocol.work.rollout import Sample
from swarm_node.engine.messages import (
    LENGTH_BYTES,
    Answer,
    Command,
    CommandFailed,
    Encode,
    Encoded,
    Ended,
    EngineProgress,
    Generate,
    GroupDone,
    Loaded,
    LoadVersion,
    Ready,
    Reply,
    SamplingStats,
    frame,
)


def answer(body: Ended | EngineProgress | Reply) -> None:
    os.write(1, frame(Answer(body=body)))


def read_exactly(size_bytes: int) -> bytes:
    data = sys.stdin.buffer.read(size_bytes)
    if len(data) < size_bytes:
        sys.exit(0)
    return data


def main(fault: str) -> None:
    if fault == "dies at once":
        sys.exit(3)
    if fault.startswith("starts late:"):
        start_late(Path(fault.partition(":")[2]))
    answer(Ready())
    while True:
        command = Command.from_bytes(read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES)))).body
        if isinstance(command, LoadVersion):
            answer(Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=True, seconds=0.0))
        elif not isinstance(command, Generate):
            answer(SamplingStats(prompt_tokens=1, first_tokens=1, prefill_s=1.0, later_tokens=1, decode_s=1.0))
        else:
            end("first")
            misbehave(fault)


def start_late(start: Path) -> NoReturn:
    """Come up when a file is there, and say of every version whether its folder is."""
    while not start.exists():
        threading.Event().wait(0.01)
    answer(Ready())
    while True:
        command = Command.from_bytes(read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES)))).body
        if isinstance(command, LoadVersion) and Path(command.folder).is_dir():
            with start.with_suffix(".loaded").open("a") as file:
                file.write(f"{command.version}\n")
            answer(Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=True, seconds=0.0))
        elif isinstance(command, Encode):
            answer(Encoded(prompts=tuple(bytes(4) for _ in command.texts)))
        elif isinstance(command, Generate):
            for request in command.requests:
                end(request.request_id)
        elif isinstance(command, LoadVersion):
            answer(CommandFailed(code="engine_failed", message=f"FileNotFoundError: {command.folder}", hint=""))
        else:
            answer(SamplingStats(prompt_tokens=1, first_tokens=1, prefill_s=1.0, later_tokens=1, decode_s=1.0))


def end(name: str) -> None:
    nothing = Sample(tokens=b"", logprobs=b"", finish="length")
    answer(GroupDone(request_id=name, samples=(nothing,), first_token_ago_s=0.0))


def misbehave(fault: str) -> None:
    match fault:
        case "hangs":
            threading.Event().wait()
        case "grows":
            kept = [bytearray(b"9" * 2**24)]
            while True:
                kept.append(bytearray(kept[0]))
                threading.Event().wait(0.01)
        case "leaves its output open":
            if os.fork() == 0:
                os.close(0)
                threading.Event().wait(5)
                os._exit(0)
            os._exit(9)
        case "dies":
            os.kill(os.getpid(), 9)
        case "prints":
            os.write(1, b"Traceback (most recent call last):\n" * 10)
            threading.Event().wait()
        case "answers something else":
            answer(Loaded(parameters=1, numerics="fake/fp32/cpu", rebuilt=True, seconds=0.0))
        case "is slow":
            for _ in range(8):
                threading.Event().wait(0.5)
                answer(EngineProgress())
            end("second")
        case "answers twice":
            end("first")
        case "sends half an answer":
            nothing = Sample(tokens=b"", logprobs=b"", finish="length")
            whole = frame(Answer(body=GroupDone(request_id="second", samples=(nothing,), first_token_ago_s=0.0)))
            os.write(1, whole[: len(whole) // 2])
            read_exactly(int.from_bytes(read_exactly(LENGTH_BYTES)))
            os.write(1, whole[len(whole) // 2 :])
            end("third")


if __name__ == "__main__":
    main(sys.argv[1])
